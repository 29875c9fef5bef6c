#include "paramwire/store/checkpoint_records.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint_directory.hpp"

#include <algorithm>
#include <fcntl.h>

namespace paramwire {

namespace {

constexpr std::string_view kTemporaryTail = ".tmp";

Status give_name(const std::string& directory, const std::string& name, FileSystem& files) {
  const std::string to = checkpoint_path(directory, name);
  const std::string from = cat(to, kTemporaryTail);
  if (const int result = files.rename(from, to); result < 0) return file_error(files, "rename", from, result, cat("to ", to));
  return {};
}

}  // namespace

Status RecordWriter::open() {
  DataHeader header = job_.header;
  header.number = job_.number.fetch_add(1, std::memory_order_relaxed);
  name_ = checkpoint_data_name(header.version, header.number);
  PARAMWIRE_TRY(file, open_file(files_, cat(checkpoint_path(job_.directory, name_), kTemporaryTail), O_RDWR | O_CREAT | O_TRUNC));
  file_ = std::move(file);
  offset_ = sent_ = 0;
  held_.clear();
  std::vector<std::byte> bytes;
  encode_data_header(bytes, header);
  return put(bytes);
}

Status RecordWriter::flush() {
  if (held_.empty()) return {};
  PARAMWIRE_CHECK(file_.write(held_, offset_ - held_.size()));
  written_ += held_.size();
  held_.clear();
  return {};
}

Status RecordWriter::put(std::span<const std::byte> bytes) {
  if (held_.size() + bytes.size() > kGatherBytes) PARAMWIRE_CHECK(flush());
  if (bytes.size() > kGatherBytes) {
    PARAMWIRE_CHECK(file_.write(bytes, offset_));
    written_ += bytes.size();
  } else {
    held_.insert(held_.end(), bytes.begin(), bytes.end());
  }
  offset_ += bytes.size();
  return {};
}

Result<RecordWriter::Place> RecordWriter::append(const EncodedRecord& record) {
  if (!file_.is_open()) PARAMWIRE_CHECK(open());
  const Place place{offset_, record.head.size() + record.payload.size()};
  PARAMWIRE_CHECK(put(record.head));
  PARAMWIRE_CHECK(put(record.payload));
  const std::uint64_t done = offset_ - held_.size();
  if (done - sent_ >= kWriteOutBytes) {
    files_.start_writing(file_.fd(), sent_, done - sent_);
    sent_ = done;
  }
  return place;
}

Result<std::uint64_t> RecordWriter::seal() {
  if (!file_.is_open()) return std::uint64_t{0};
  PARAMWIRE_CHECK(flush());
  PARAMWIRE_CHECK(file_.sync());
  file_.close();
  PARAMWIRE_CHECK(give_name(job_.directory, name_, files_));
  return offset_;
}

void RecordWriter::leave() {
  if (!file_.is_open()) return;
  static_cast<void>(flush().ok());  // the save failed already, of what was told
  file_.close();
}

Result<CheckpointFile> salvage_data_file(const std::string& directory, const std::string& name, const DataHeader& wanted,
                                         const std::function<bool(const SalvagedRecord&)>& take, FileSystem& files) {
  const bool temporary = name.ends_with(kTemporaryTail);
  const std::string sealed_name = temporary ? name.substr(0, name.size() - kTemporaryTail.size()) : name;
  const std::string path = checkpoint_path(directory, name);
  PARAMWIRE_TRY(file, open_file(files, path, O_RDWR));
  PARAMWIRE_TRY(size, file.size());
  std::uint64_t good = 0;
  std::vector<std::byte> first(static_cast<std::size_t>(std::min<std::uint64_t>(kDataHeaderBytes, size)));
  PARAMWIRE_CHECK(file.read(first, 0));
  const auto header = decode_data_header(first);
  if (header.ok() && header->version == wanted.version && header->root == wanted.root && header->number == parse_checkpoint_name(name).number) good = kDataHeaderBytes;
  while (good > 0 && size - good >= kRecordHeaderBytes) {
    SalvagedRecord record;
    record.offset = good;
    record.bytes.resize(kRecordHeaderBytes);
    PARAMWIRE_CHECK(file.read(record.bytes, good));
    const auto fixed = decode_record_header(record.bytes);
    if (!fixed.ok() || fixed->record_size() > size - good) break;
    record.bytes.resize(static_cast<std::size_t>(fixed->head_size()));
    PARAMWIRE_CHECK(file.read(record.bytes, good));
    auto head = decode_record_head(record.bytes);
    if (!head.ok()) break;
    record.head = *std::move(head);
    PARAMWIRE_TRY(check, scan_payload(file, good, record.head, {}));
    if (check.crc64 != record.head.header.stored_crc64 || !check.bad_extents.empty() || !take(record)) break;
    good += record.head.header.record_size();
  }
  if (good <= kDataHeaderBytes) {
    file.close();
    if (const int result = files.unlink(path); result < 0) return file_error(files, "remove", path, result);
    return CheckpointFile{sealed_name, 0};
  }
  if (good < size) {
    if (const int result = files.truncate(file.fd(), good); result < 0) return file_error(files, "cut", path, result);
  }
  PARAMWIRE_CHECK(file.sync());
  file.close();
  if (temporary) PARAMWIRE_CHECK(give_name(directory, sealed_name, files));
  return CheckpointFile{sealed_name, good};
}

}  // namespace paramwire
