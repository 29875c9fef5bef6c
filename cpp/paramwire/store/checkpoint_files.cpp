#include "paramwire/store/checkpoint_files.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace paramwire {

namespace {

template <typename T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

class PosixFiles final : public FileSystem {
 public:
  int open(const std::string& path, int flags, unsigned mode) override {
    // O_NONBLOCK: opening a FIFO waits for its other end, for ever when there is none. To a regular file it means nothing.
    const int fd = or_errno(::open(path.c_str(), flags | O_NONBLOCK, mode));
    if (fd < 0 || (flags & O_DIRECTORY) != 0) return fd;
    struct stat found {};
    const int error = ::fstat(fd, &found) != 0 ? errno : S_ISREG(found.st_mode) ? 0 : S_ISDIR(found.st_mode) ? EISDIR : ENXIO;
    if (error == 0) return fd;
    ::close(fd);
    return -error;
  }
  void close(int fd) override { ::close(fd); }  // after sync(): what close(2) could still say was said there
  std::int64_t pread(int fd, std::span<std::byte> target, std::uint64_t offset) override {
    return or_errno(static_cast<std::int64_t>(::pread(fd, target.data(), target.size(), static_cast<off_t>(offset))));
  }
  std::int64_t pwrite(int fd, std::span<const std::byte> source, std::uint64_t offset) override {
    return or_errno(static_cast<std::int64_t>(::pwrite(fd, source.data(), source.size(), static_cast<off_t>(offset))));
  }
  std::int64_t size(int fd) override {
    struct stat found {};
    return ::fstat(fd, &found) != 0 ? -errno : static_cast<std::int64_t>(found.st_size);
  }
  int truncate(int fd, std::uint64_t size) override { return or_errno(::ftruncate(fd, static_cast<off_t>(size))); }
  int sync(int fd) override { return or_errno(::fsync(fd)); }
  void start_writing(int fd, std::uint64_t offset, std::uint64_t size) override {
    ::sync_file_range(fd, static_cast<off64_t>(offset), static_cast<off64_t>(size), SYNC_FILE_RANGE_WRITE);
  }
  int rename(const std::string& from, const std::string& to) override { return or_errno(::rename(from.c_str(), to.c_str())); }
  int unlink(const std::string& path) override { return or_errno(::unlink(path.c_str())); }
  int make_directory(const std::string& path, unsigned mode) override { return or_errno(::mkdir(path.c_str(), mode)); }
  int list(const std::string& path, std::vector<std::string>& names) override {
    struct Close {
      void operator()(DIR* directory) const noexcept { ::closedir(directory); }
    };
    const std::unique_ptr<DIR, Close> directory(::opendir(path.c_str()));
    if (!directory) return -errno;
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(directory.get());
      if (entry == nullptr) return -errno;
      const std::string_view name(entry->d_name);
      if (name != "." && name != "..") names.emplace_back(name);
    }
  }
  int lock(int fd, bool exclusive) override { return or_errno(::flock(fd, (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB)); }
  void unlock(int fd) override { ::flock(fd, LOCK_UN); }
  std::int64_t free_bytes(const std::string& path) override {
    struct statvfs found {};
    if (::statvfs(path.c_str(), &found) != 0) return -errno;
    return static_cast<std::int64_t>(found.f_bavail) * static_cast<std::int64_t>(found.f_frsize);
  }
};

}  // namespace

FileSystem& posix_files() {
  static PosixFiles files;
  return files;
}

Error file_error(FileSystem& files, std::string_view call, const std::string& path, std::int64_t error, std::string_view detail) {
  const auto number = static_cast<int>(-error);
  const std::string what = detail.empty() ? cat(call, ' ', path) : cat(call, ' ', path, ": ", detail);
  const auto with = [&](Code code, std::string_view next) {
    const Error plain = errno_error(code, what, number);
    return Error(code, cat(plain.message(), "; ", next));
  };
  switch (number) {
    case ENOSPC:
    case EDQUOT: {
      const std::size_t slash = path.rfind('/');
      const std::int64_t room = files.free_bytes(slash == std::string::npos ? "." : path.substr(0, std::max<std::size_t>(slash, 1)));
      return with(Code::kBackpressure, cat(room < 0 ? std::string("no room") : cat(room, " bytes (", human_bytes(static_cast<std::uint64_t>(room)), ") are free there for this user"),
                                           ": free some, keep fewer checkpoints, or save into another directory; earlier checkpoints are whole"));
    }
    case EROFS:
    case EACCES:
    case EPERM: return with(Code::kUnavailable, "make it writable for this user, or name another directory");
    case ENOENT:
    case ENOTDIR: return with(Code::kNotFound, "check the path");
    case EIO: return with(Code::kCorrupt, "the device gives no bytes: look at the kernel's log, and take another replica");
    case EFBIG: return with(Code::kUnavailable, "the file system, or this process's limit (ulimit -f), takes no file of that size: name another directory, or raise the limit");
    case EMFILE:
    case ENFILE: return with(Code::kBackpressure, "raise the limit of open files (ulimit -n)");
    case ENOLCK:
    case EOPNOTSUPP: return with(Code::kUnavailable, "this file system can't do that: name a directory on a local one");
    default: return with(Code::kUnavailable, "name another directory, or mend this one");
  }
}

void File::close() noexcept {
  if (fd_ < 0) return;
  if (std::exchange(locker_, 0) == ::getpid()) files_->unlock(fd_);
  files_->close(std::exchange(fd_, -1));
}

int File::lock(bool exclusive) {
  const int result = files_->lock(fd_, exclusive);
  if (result >= 0) locker_ = ::getpid();
  return result;
}

Status File::read(std::span<std::byte> target, std::uint64_t offset) const {
  std::size_t done = 0;
  while (done < target.size()) {
    const auto piece = target.subspan(done, std::min(kFilePieceBytes, target.size() - done));
    const std::int64_t count = files_->pread(fd_, piece, offset + done);
    if (count == -EINTR) continue;
    if (count < 0) return file_error(*files_, "read", path_, count, cat("at byte ", offset + done));
    if (count == 0) {
      return Error(Code::kCorrupt, cat(path_, " ends at byte ", offset + done, ", ", target.size() - done, " bytes before what is to be read: it was cut"));
    }
    done += static_cast<std::size_t>(count);
  }
  return {};
}

Status File::write(std::span<const std::byte> source, std::uint64_t offset) {
  std::size_t done = 0;
  while (done < source.size()) {
    const auto piece = source.subspan(done, std::min(kFilePieceBytes, source.size() - done));
    const std::int64_t count = files_->pwrite(fd_, piece, offset + done);
    if (count == -EINTR) continue;
    // write(2) of something to a regular file gives 0 nowhere; as an error it ends the loop at least.
    if (count <= 0) return file_error(*files_, "write", path_, count == 0 ? -EIO : count, cat("at byte ", offset + done, ", ", source.size() - done, " bytes more were to be written"));
    done += static_cast<std::size_t>(count);
  }
  return {};
}

Status File::sync() {
  int result = files_->sync(fd_);
  while (result == -EINTR) result = files_->sync(fd_);
  if (result < 0) return file_error(*files_, "fsync", path_, result);
  return {};
}

Result<std::uint64_t> File::size() const {
  const std::int64_t found = files_->size(fd_);
  if (found < 0) return file_error(*files_, "fstat", path_, found);
  return static_cast<std::uint64_t>(found);
}

Result<File> open_file(FileSystem& files, const std::string& path, int flags) {
  // For everybody that the umask lets: a checkpoint has no secrets that its model has not.
  constexpr unsigned kMode = 0666;
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  const int all = flags | O_CLOEXEC | (writes ? O_NOFOLLOW : 0);
  int fd = files.open(path, all, kMode);
  while (fd == -EINTR) fd = files.open(path, all, kMode);
  if (fd >= 0) return File(files, fd, path);
  if (fd != -EISDIR && fd != -ENXIO && fd != -ELOOP) return file_error(files, "open", path, fd);
  const std::string plain = errno_error(Code::kCorrupt, cat("open ", path), -fd).message();
  if (writes) return Error(Code::kUnavailable, cat(plain, "; only regular files are written here, and none through a symbolic link: remove what has that name"));
  return Error(Code::kCorrupt, cat(plain, "; a checkpoint's files are regular ones: somebody put something else there. Remove it, and take another checkpoint or replica"));
}

Status sync_directory(FileSystem& files, const std::string& path) {
  PARAMWIRE_TRY(directory, open_file(files, path, O_RDONLY | O_DIRECTORY));
  return directory.sync();
}

}  // namespace paramwire
