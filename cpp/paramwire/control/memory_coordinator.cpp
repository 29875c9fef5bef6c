// The in-process coordinator.
#include "paramwire/base/text.hpp"
#include "paramwire/control/coordinator.hpp"
#include "paramwire/control/version_clock.hpp"

#include <cerrno>
#include <charconv>
#include <ctime>
#include <fcntl.h>
#include <mutex>
#include <unistd.h>

namespace paramwire {

namespace {

class MemoryCoordinator final : public Coordinator {
 public:
  explicit MemoryCoordinator(std::uint32_t epoch) : epoch_(epoch) {}
  std::uint32_t epoch() const override { return epoch_; }
  std::optional<Version> newest() const override {
    const std::lock_guard lock(mutex_);
    return clock_.newest();
  }
  std::array<std::byte, 32> root() const override {
    const std::lock_guard lock(mutex_);
    return clock_.root();
  }
  Status commit(const std::optional<Version>& base, Version next, const std::array<std::byte, 32>& root) override {
    const std::lock_guard lock(mutex_);
    return clock_.commit(base, next, root);
  }

 private:
  const std::uint32_t epoch_;
  mutable std::mutex mutex_;
  VersionClock clock_;
};

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

constexpr std::string_view kStateHead = "paramwire-state 1\nepoch ";
constexpr std::size_t kStateBytesMax = 256;

// The stored epoch; 0 when there is no file yet.
Result<std::uint32_t> read_epoch(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ENOENT) return std::uint32_t{0};
    return errno_error(Code::kUnavailable, cat("read state file ", path), errno);
  }
  char text[kStateBytesMax];
  const ssize_t size = ::read(file.get(), text, sizeof text);
  if (size < 0) return errno_error(Code::kUnavailable, cat("read state file ", path), errno);
  const std::string_view content(text, static_cast<std::size_t>(size));
  std::uint32_t epoch = 0;
  if (content.starts_with(kStateHead)) {
    const auto [end, error] = std::from_chars(text + kStateHead.size(), text + size, epoch);
    if (error == std::errc() && epoch != 0 && content.substr(static_cast<std::size_t>(end - text)) == "\n") return epoch;
  }
  return Error(Code::kInvalid, cat("state file ", path, " is malformed (", size, " bytes): it must say \"epoch N\"; "
                                   "a lower epoch would let old writers in, so repair it by hand or name another file"));
}

// Temp file, fsync, rename, fsync of the directory: after a crash the file is the old one or the new one.
Status write_epoch(const std::string& path, std::uint32_t epoch) {
  const std::string temp = cat(path, ".", ::getpid(), ".tmp");
  const std::string text = cat(kStateHead, epoch, "\n");
  const auto failed = [&](std::string_view step) {
    const int error = errno;
    ::unlink(temp.c_str());
    return errno_error(Code::kUnavailable, cat(step, " state file ", path), error);
  };
  {
    const File file(::open(temp.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (file.get() < 0) return failed("create");
    if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) return failed("write");
    if (::fsync(file.get()) != 0) return failed("fsync");
  }
  if (::rename(temp.c_str(), path.c_str()) != 0) return failed("rename");
  const std::size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const File parent(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.get() < 0 || ::fsync(parent.get()) != 0) return errno_error(Code::kUnavailable, cat("fsync ", directory), errno);
  return {};
}

}  // namespace

Result<std::unique_ptr<Coordinator>> open_coordinator(std::string_view spec) {
  if (spec == "memory") {
    constexpr std::time_t kStart = 1577836800;  // 2020-01-01; 32 bits of seconds last until 2156
    const std::time_t now = std::time(nullptr);
    const auto epoch = static_cast<std::uint32_t>(now > kStart ? now - kStart : 1);
    return std::unique_ptr<Coordinator>(std::make_unique<MemoryCoordinator>(epoch));
  }
  constexpr std::string_view kWithFile = "memory:";
  if (spec.starts_with(kWithFile) && spec.size() > kWithFile.size()) {
    const std::string path(spec.substr(kWithFile.size()));
    PARAMWIRE_TRY(stored, read_epoch(path));
    if (stored == 0xffffffffU) return Error(Code::kInvalid, cat("state file ", path, ": epochs are used up"));
    PARAMWIRE_CHECK(write_epoch(path, stored + 1));
    return std::unique_ptr<Coordinator>(std::make_unique<MemoryCoordinator>(stored + 1));
  }
  return Error(Code::kInvalid, cat("unknown coordinator \"", spec, "\"; known: memory, memory:PATH"));
}

}  // namespace paramwire
