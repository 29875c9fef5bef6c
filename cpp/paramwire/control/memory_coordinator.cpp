// The in-process coordinator.
#include "paramwire/base/env.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/control/coordinator.hpp"
#include "paramwire/control/version_clock.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <fcntl.h>
#include <mutex>
#include <sys/file.h>
#include <unistd.h>
#include <utility>

namespace paramwire {

namespace {

class File {
 public:
  explicit File(int fd = -1) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&&) = delete;
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

class MemoryCoordinator final : public Coordinator {
 public:
  // `lock`: the held lock of the state file, if there is one.
  MemoryCoordinator(std::uint32_t epoch, File lock) : epoch_(epoch), lock_(std::move(lock)) {}
  // The lock is the open file's, not the descriptor's: a child forked meanwhile has the descriptor too, and would keep the lock. Its own copy of this
  // object must leave it to the parent.
  ~MemoryCoordinator() override {
    if (lock_.get() >= 0 && owner_ == ::getpid()) ::flock(lock_.get(), LOCK_UN);
  }
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
  const File lock_;
  const pid_t owner_ = ::getpid();
  mutable std::mutex mutex_;
  VersionClock clock_;
};

constexpr std::string_view kStateHead = "paramwire-state 1\nepoch ";
constexpr std::size_t kStateBytesMax = 256;

// Two servers on one state file would take turns in raising the epoch. The lock lies beside the file, which is replaced.
Result<File> lock_state(const std::string& path) {
  const std::string lock_path = path + ".lock";
  File file(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (file.get() < 0) return errno_error(Code::kUnavailable, cat("open ", lock_path), errno);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return file;
  if (errno != EWOULDBLOCK) return errno_error(Code::kUnavailable, cat("lock ", lock_path), errno);
  return Error(Code::kUnavailable, cat("state file ", path, " is in use by another server: give each server its own"));
}

// The stored epoch; 0 when there is no file yet.
Result<std::uint32_t> read_epoch(const std::string& path) {
  // O_NONBLOCK: a pipe is not waited for.
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
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

Result<std::unique_ptr<Coordinator>> open_coordinator(std::string_view spec, std::uint32_t epoch_after) {
  if (epoch_after == 0xffffffffU) return Error(Code::kInvalid, cat("no epoch is above ", epoch_after, ", that of the checkpoint: epochs are used up"));
  if (spec == "memory") {
    constexpr std::time_t kStart = 1577836800;  // 2020-01-01; 32 bits of seconds last until 2156
    const std::time_t now = std::time(nullptr);
    const auto epoch = static_cast<std::uint32_t>(now > kStart ? now - kStart : 1);
    return std::unique_ptr<Coordinator>(std::make_unique<MemoryCoordinator>(std::max(epoch, epoch_after + 1), File()));
  }
  constexpr std::string_view kWithFile = "memory:";
  if (spec.starts_with(kWithFile) && spec.size() > kWithFile.size()) {
    const std::string path(spec.substr(kWithFile.size()));
    PARAMWIRE_TRY(lock, lock_state(path));
    PARAMWIRE_TRY(stored, read_epoch(path));
    if (stored == 0xffffffffU) return Error(Code::kInvalid, cat("state file ", path, ": epochs are used up"));
    const std::uint32_t epoch = std::max(stored, epoch_after) + 1;
    PARAMWIRE_CHECK(write_epoch(path, epoch));
    return std::unique_ptr<Coordinator>(std::make_unique<MemoryCoordinator>(epoch, std::move(lock)));
  }
  return Error(Code::kInvalid, cat("unknown coordinator \"", spec, "\"; known: memory, memory:PATH"));
}

std::vector<Availability> available_coordinators() {
  // Where etcd serves clients by default (etcd.io, "Configuration options", listen-client-urls).
  constexpr std::uint16_t kEtcdPort = 2379;
  // Loopback answers at once; longer means that somebody drops what comes in.
  constexpr Micros kPatience = kMicrosPerSecond / 4;
  const auto etcd = Socket::connect(Endpoint::tcp("127.0.0.1", kEtcdPort), steady_clock().now() + kPatience);
  const std::string found = etcd.ok() ? cat("though something listens at 127.0.0.1:", kEtcdPort) : cat("and no server answers at 127.0.0.1:", kEtcdPort);
  return {{"memory", true, "in the server's process; a state file keeps its epoch over restarts"},
          {"etcd", false, cat("not in this build, ", found), "keep the epoch in a file: paramwire serve MODEL --state FILE"}};
}

}  // namespace paramwire
