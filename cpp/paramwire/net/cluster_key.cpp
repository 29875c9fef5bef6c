#include "paramwire/net/cluster_key.hpp"

#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

namespace paramwire {

namespace {

constexpr std::string_view kDigits = "0123456789abcdef";
constexpr std::size_t kTextBytes = 2 * kClusterKeyBytes + 1;
constexpr std::string_view kIdLabel = "paramwire cluster key id";

// Memory that is cleansed whichever way its scope ends.
template <std::size_t N>
struct Cleansed {
  std::array<char, N> bytes{};
  Cleansed() = default;
  Cleansed(const Cleansed&) = delete;
  Cleansed& operator=(const Cleansed&) = delete;
  ~Cleansed() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
};

std::string octal(mode_t mode) {
  std::string out = "0000";
  for (std::size_t i = 0; i < 4; ++i) out[3 - i] = kDigits[(mode >> (3 * i)) & 7U];
  return out;
}

int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

Status check_file(const std::string& path, const struct stat& found) {
  if (!S_ISREG(found.st_mode)) return Error(Code::kInvalid, cat("key file ", path, " is no regular file: name a file that \"paramwire key new FILE\" made"));
  if (found.st_uid != ::geteuid()) {
    return Error(Code::kDenied, cat("key file ", path, " belongs to user ", found.st_uid, " and this process is user ", ::geteuid(),
                                    ": that user could change it; run \"chown ", ::geteuid(), ' ', path, "\" or take a copy of your own"));
  }
  if ((found.st_mode & 077) != 0) {
    return Error(Code::kDenied, cat("key file ", path, " has mode ", octal(found.st_mode & 07777), ": others may use it; run \"chmod 600 ", path,
                                    "\", and if others could read it, make a new key with \"paramwire key new\" and give it to every node"));
  }
  return {};
}

// As many bytes as there are, up to the buffer's size. -1: errno.
ssize_t read_all(int fd, std::span<char> into) {
  std::size_t have = 0;
  while (have < into.size()) {
    const ssize_t n = ::read(fd, into.data() + have, into.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    have += static_cast<std::size_t>(n);
  }
  return static_cast<ssize_t>(have);
}

}  // namespace

ClusterKey::~ClusterKey() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

void ClusterKey::name() {
  Cleansed<kIdLabel.size() + kClusterKeyBytes> input;
  std::memcpy(input.bytes.data(), kIdLabel.data(), kIdLabel.size());
  std::memcpy(input.bytes.data() + kIdLabel.size(), bytes_.data(), bytes_.size());
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  EVP_Digest(input.bytes.data(), input.bytes.size(), digest.data(), nullptr, EVP_sha256(), nullptr);
  for (std::size_t i = 0; i < 8; ++i) {
    id_ += kDigits[digest[i] >> 4U];
    id_ += kDigits[digest[i] & 15U];
  }
}

std::shared_ptr<const ClusterKey> ClusterKey::from_bytes(std::span<const std::byte, kClusterKeyBytes> bytes) {
  const std::shared_ptr<ClusterKey> key(new ClusterKey());
  std::memcpy(key->bytes_.data(), bytes.data(), bytes.size());
  key->name();
  return key;
}

Result<std::shared_ptr<const ClusterKey>> ClusterKey::load(const std::string& path) {
  if (path.find('\0') != std::string::npos) return Error(Code::kInvalid, "the path of the key file holds a zero byte");
  // O_NONBLOCK: a FIFO of that name must not hold us until somebody writes. What is checked is what was opened, not the path.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid()) {
    const int error = errno;
    if (error == ENOENT) return Error(Code::kNotFound, cat("there is no key file ", path, ": make one with \"paramwire key new ", path, "\", or copy the cluster's"));
    if (error == ELOOP) return Error(Code::kInvalid, cat("key file ", path, " is a symbolic link, which may lead elsewhere tomorrow: name the file itself (\"readlink -f ", path, "\")"));
    return errno_error(error == EACCES ? Code::kDenied : Code::kUnavailable, cat("key file ", path, ": it must be a readable file of user ", ::geteuid()), error);
  }
  struct stat found{};
  if (::fstat(fd.get(), &found) != 0) return errno_error(Code::kUnavailable, cat("key file ", path), errno);
  PARAMWIRE_CHECK(check_file(path, found));

  Cleansed<kTextBytes + 1> text;  // one more than a key has, to see what is too long
  const ssize_t size = read_all(fd.get(), text.bytes);
  if (size < 0) return errno_error(Code::kUnavailable, cat("read key file ", path), errno);
  const auto have = static_cast<std::size_t>(size);
  const bool whole = have == kTextBytes - 1 || (have == kTextBytes && text.bytes[kTextBytes - 1] == '\n');
  if (!whole) {
    return Error(Code::kInvalid, cat("key file ", path, " has ", found.st_size, " bytes, a key is ", kTextBytes - 1,
                                     " hexadecimal digits and a newline: make one with \"paramwire key new FILE\", or copy the cluster's whole"));
  }
  const std::shared_ptr<ClusterKey> key(new ClusterKey());
  for (std::size_t i = 0; i < kClusterKeyBytes; ++i) {
    const int high = digit_value(text.bytes[2 * i]);
    const int low = digit_value(text.bytes[2 * i + 1]);
    if (high < 0 || low < 0) {
      return Error(Code::kInvalid, cat("key file ", path, ": position ", 2 * i + (high < 0 ? 0 : 1), " is no hexadecimal digit; make a key with \"paramwire key new FILE\", or copy the cluster's whole"));
    }
    key->bytes_[i] = static_cast<std::byte>(high * 16 + low);
  }
  key->name();
  return std::shared_ptr<const ClusterKey>(key);
}

Result<std::shared_ptr<const ClusterKey>> ClusterKey::create(const std::string& path) {
  if (path.find('\0') != std::string::npos) return Error(Code::kInvalid, "the path of the key file holds a zero byte");
  const std::shared_ptr<ClusterKey> key(new ClusterKey());
  // 32 bytes come whole or not at all (getrandom(2)).
  if (::getrandom(key->bytes_.data(), key->bytes_.size(), 0) != static_cast<ssize_t>(key->bytes_.size())) return errno_error(Code::kUnavailable, "getrandom", errno);
  key->name();
  Cleansed<kTextBytes> text;
  for (std::size_t i = 0; i < kClusterKeyBytes; ++i) {
    const auto value = std::to_integer<unsigned>(key->bytes_[i]);
    text.bytes[2 * i] = kDigits[value >> 4U];
    text.bytes[2 * i + 1] = kDigits[value & 15U];
  }
  text.bytes[kTextBytes - 1] = '\n';

  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) {
    if (errno == EEXIST) {
      return Error(Code::kInvalid, cat(path, " is there already and is left as it is: nodes that have its key would be shut out; name another file, or move that one"));
    }
    return errno_error(Code::kUnavailable, cat("make key file ", path), errno);
  }
  // The umask can only have taken bits away; a key that its owner can't read is of no use.
  bool written = ::fchmod(fd.get(), 0600) == 0;
  for (std::size_t done = 0; written && done < kTextBytes;) {
    const ssize_t n = ::write(fd.get(), text.bytes.data() + done, kTextBytes - done);
    if (n > 0) done += static_cast<std::size_t>(n);
    else if (n == 0 || errno != EINTR) written = false;
  }
  if (written && ::fsync(fd.get()) == 0) return std::shared_ptr<const ClusterKey>(key);
  const Error error = errno_error(Code::kUnavailable, cat("write key file ", path), errno);
  ::unlink(path.c_str());
  return error;
}

}  // namespace paramwire
