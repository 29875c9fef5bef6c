// The file system as checkpoints use it: a table of calls with one real implementation, and what every use of it shares.
//
// Tests bring a table that counts calls, returns short counts, fills the disk or stops for good at the n-th call (tests/support/memory_files.hpp).
#pragma once

#include "paramwire/base/error.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <utility>
#include <vector>

namespace paramwire {

// System calls: each returns what the call of that name does, or -errno. Any thread.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Of a directory without O_DIRECTORY -EISDIR, of what is no regular file -ENXIO: nothing in a directory makes it wait.
  virtual int open(const std::string& path, int flags, unsigned mode) = 0;
  virtual void close(int fd) = 0;
  // May be short, as in pread(2).
  virtual std::int64_t pread(int fd, std::span<std::byte> target, std::uint64_t offset) = 0;
  virtual std::int64_t pwrite(int fd, std::span<const std::byte> source, std::uint64_t offset) = 0;
  virtual std::int64_t size(int fd) = 0;  // fstat(2), st_size
  virtual int truncate(int fd, std::uint64_t size) = 0;
  virtual int sync(int fd) = 0;  // fsync(2), of files and directories
  // Starts writing these bytes to the device, so that sync() finds less to do (sync_file_range(2), SYNC_FILE_RANGE_WRITE). A hint: no result.
  virtual void start_writing(int fd, std::uint64_t offset, std::uint64_t size) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int unlink(const std::string& path) = 0;
  virtual int make_directory(const std::string& path, unsigned mode) = 0;
  // Names in a directory but "." and "..", in any order.
  virtual int list(const std::string& path, std::vector<std::string>& names) = 0;
  // flock(2) without waiting.
  virtual int lock(int fd, bool exclusive) = 0;
  virtual void unlock(int fd) = 0;
  // Bytes free for this user (statvfs(2)); for error texts.
  virtual std::int64_t free_bytes(const std::string& path) = 0;
};

// The kernel's. Any thread; never destroyed.
FileSystem& posix_files();

// One open file or directory. Move-only.
class File {
 public:
  File() = default;
  File(FileSystem& files, int fd, std::string path) : files_(&files), fd_(fd), path_(std::move(path)) {}
  File(File&& other) noexcept
      : files_(other.files_), fd_(std::exchange(other.fd_, -1)), locker_(std::exchange(other.locker_, 0)), path_(std::move(other.path_)) {}
  File& operator=(File&& other) noexcept {
    close();
    files_ = other.files_;
    fd_ = std::exchange(other.fd_, -1);
    locker_ = std::exchange(other.locker_, 0);
    path_ = std::move(other.path_);
    return *this;
  }
  ~File() { close(); }
  // Unlocks first what this process locked. The lock of flock(2) is the open file's, not the descriptor's: a child of a fork meanwhile has the descriptor
  // too, and closing would leave the lock to it; and the child's own close, of what it was given, must take nothing from its parent.
  void close() noexcept;
  bool is_open() const noexcept { return fd_ >= 0; }
  int fd() const noexcept { return fd_; }
  const std::string& path() const noexcept { return path_; }

  // All of `target` from `offset`, in pieces, over short counts and signals.
  // errors: kCorrupt when the file ends before (naming both sizes) or the device gives no bytes; as file_error.
  Status read(std::span<std::byte> target, std::uint64_t offset) const;
  // All of `source`. errors: as file_error.
  Status write(std::span<const std::byte> source, std::uint64_t offset);
  Status sync();
  // Until close(). returns: 0 or -errno, -EWOULDBLOCK when somebody has it.
  int lock(bool exclusive);
  Result<std::uint64_t> size() const;

 private:
  FileSystem* files_ = nullptr;
  int fd_ = -1;
  pid_t locker_ = 0;  // who locked it; 0: nobody
  std::string path_;
};

// Bytes that one pread or pwrite is given at most. The kernel moves at most 0x7ffff000 bytes in a call (write(2)); less keeps a save that is
// to stop from waiting long, and more would save nothing: a call is some microseconds, these take milliseconds.
inline constexpr std::size_t kFilePieceBytes = std::size_t{8} << 20;

// open(2) with O_CLOEXEC, and O_NOFOLLOW for writing: a link in a directory must not lead a save to another file.
// errors: kNotFound when it is not there; of what is no regular file kCorrupt to read, kUnavailable to write; as file_error.
Result<File> open_file(FileSystem& files, const std::string& path, int flags);
// fsync of a directory, so that the names in it are durable.
Status sync_directory(FileSystem& files, const std::string& path);
// `call` is what failed ("write", "rename"), `error` the negative errno, `detail` more for people.
//   ENOSPC, EDQUOT: kBackpressure with what is free;  EROFS, EACCES, EPERM: kUnavailable, to be made writable;  ENOENT: kNotFound;  EIO: kCorrupt;
//   anything else: kUnavailable with the errno's text.
Error file_error(FileSystem& files, std::string_view call, const std::string& path, std::int64_t error, std::string_view detail = {});

}  // namespace paramwire
