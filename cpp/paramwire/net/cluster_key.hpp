// The cluster key: 32 random bytes in a file. Who has it may read and publish everything; there are no users beside.
//
// File (wire/FORMAT.md, "Cluster key"): 64 hexadecimal digits and a newline. It must be a regular file of this user that nobody
// else may touch. No text of this project holds a key: errors and records name its id.
#pragma once

#include "paramwire/base/error.hpp"

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace paramwire {

inline constexpr std::size_t kClusterKeyBytes = 32;

// Not copied: the bytes lie in one place, which is cleansed at the end. Any thread.
class ClusterKey {
 public:
  ~ClusterKey();
  ClusterKey(const ClusterKey&) = delete;
  ClusterKey& operator=(const ClusterKey&) = delete;

  // errors: kNotFound when there is no file; kDenied when others can read or write it, or it is another user's; kInvalid for a
  //         symbolic link, anything that is no regular file, and other contents than 64 hexadecimal digits; kUnavailable with errno.
  //         Each names the path, what was found, and the command that mends it.
  static Result<std::shared_ptr<const ClusterKey>> load(const std::string& path);
  // Draws a key and writes its file with mode 0600. errors: kInvalid when there is a file of that name, which is left as it is;
  // kUnavailable with errno; then no file is left behind.
  static Result<std::shared_ptr<const ClusterKey>> create(const std::string& path);
  // From memory, for programs that keep keys in a store of their own. `bytes` stays the caller's to cleanse.
  static std::shared_ptr<const ClusterKey> from_bytes(std::span<const std::byte, kClusterKeyBytes> bytes);

  std::span<const std::byte, kClusterKeyBytes> bytes() const noexcept { return bytes_; }
  // 16 hexadecimal digits that tell keys apart and say nothing about them: the first 8 bytes of
  // SHA-256("paramwire cluster key id" | key).
  const std::string& id() const noexcept { return id_; }

 private:
  ClusterKey() = default;
  void name();

  std::array<std::byte, kClusterKeyBytes> bytes_{};
  std::string id_;
};

}  // namespace paramwire
