// Records on their way into data files. One thread; several writers of one save run side by side.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/store/checkpoint_block.hpp"
#include "paramwire/store/checkpoint_files.hpp"
#include "paramwire/store/checkpoint_format.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace paramwire {

// Writes records one after the other into data files of one save, each under its temporary name until it is sealed.
class RecordWriter {
 public:
  struct Job {
    std::string directory;
    DataHeader header;                    // but for the number
    std::atomic<std::uint32_t> number{0}; // of the next file
  };
  struct Place {
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
  };
  RecordWriter(Job& job, FileSystem& files) : job_(job), files_(files) {}

  // Appends a record; opens a file where none is open. errors: as file_error; nothing of what was appended is lost by one.
  Result<Place> append(const EncodedRecord& record);
  // Name of the file that the last append() wrote to, as it will be when sealed.
  const std::string& name() const noexcept { return name_; }
  bool wants_seal() const noexcept { return offset_ >= kDataFileBytes; }
  // Writes what is held back, syncs, and gives the file its name. returns: its size. Nothing to do: 0.
  Result<std::uint64_t> seal();
  // Writes what is held back, so that a save that goes on later finds it. No sync: CRCs say what arrived.
  void leave();
  std::uint64_t written_bytes() const noexcept { return written_; }

 private:
  // Bounds how much one file keeps when most of its blocks are not needed any more, and how many files there are: a terabyte has a thousand.
  static constexpr std::uint64_t kDataFileBytes = std::uint64_t{1} << 30;
  // Records up to here are gathered: one write instead of one a record.
  static constexpr std::size_t kGatherBytes = std::size_t{1} << 20;
  // Written data that the kernel is told to send to the device at once, so that the sync at the end finds little to do.
  static constexpr std::uint64_t kWriteOutBytes = std::uint64_t{32} << 20;

  Status open();
  Status flush();
  Status put(std::span<const std::byte> bytes);

  Job& job_;
  FileSystem& files_;
  File file_;
  std::string name_;
  std::vector<std::byte> held_;    // appended, not written
  std::uint64_t offset_ = 0;       // end of what was appended
  std::uint64_t sent_ = 0;         // start_writing() up to here
  std::uint64_t written_ = 0;
};

// What is whole in a data file that an ended save left behind.
struct SalvagedRecord {
  RecordHead head;                // its entry's views are into `bytes`
  std::vector<std::byte> bytes;
  std::uint64_t offset = 0;
};
// Reads the file `name` from its start. `take` says of each whole record whether it is wanted; the first that is not, or is not whole, ends it. What
// comes behind is cut off and the file is sealed; without any record, or with another header than `wanted`, it is removed.
// returns: the sealed file, its size 0 when it was removed.   errors: as file_error.
Result<CheckpointFile> salvage_data_file(const std::string& directory, const std::string& name, const DataHeader& wanted,
                                         const std::function<bool(const SalvagedRecord&)>& take, FileSystem& files);

}  // namespace paramwire
