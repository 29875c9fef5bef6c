// A file system in memory, for checkpoints: one level of names, what is durable told apart from what is only written, and a call at which the
// process or the machine stops for good.
//
// A dead one answers every call with EIO and does nothing, so that code that cleans up after an error changes nothing: what is there is what a
// SIGKILL at that call would have left. Any thread.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/store/checkpoint_files.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace paramwire::testing {

using FileBytes = std::vector<std::byte>;

class MemoryFiles final : public FileSystem {
 public:
  MemoryFiles() = default;
  // Files of a directory "d", all durable.
  explicit MemoryFiles(const std::map<std::string, FileBytes>& files) {
    made_ = true;
    for (const auto& [name, bytes] : files) {
      auto node = std::make_shared<Node>();
      node->now = node->durable = bytes;
      names_["d/" + name] = durable_names_["d/" + name] = node;
    }
  }

  // ---- what goes wrong
  std::uint64_t die_at = 0;                    // the call with this number, from 1, and all later ones do nothing; 0: never
  std::uint64_t room = ~std::uint64_t{0};      // bytes of all files together; more is ENOSPC
  std::size_t piece_max = ~std::size_t{0};     // most bytes that one read or write moves
  bool interrupts = false;                     // every other read, write, open and sync is EINTR
  std::function<int(const std::string& call, const std::string& path)> refuse;  // an errno, or 0

  std::uint64_t calls() const { return calls_; }
  bool dead() const { return die_at != 0 && calls_ >= die_at; }

  // ---- what is left
  // After the process stopped: all that was written is there.
  std::map<std::string, FileBytes> after_death() const {
    std::map<std::string, FileBytes> out;
    for (const auto& [path, node] : names_) out[path.substr(2)] = node->now;
    return out;
  }
  // After the machine stopped: what was synced is there; of what was not, some names and some pages, and zeros for some.
  std::map<std::string, FileBytes> after_power_loss(Random& random) const {
    auto names = durable_names_;
    // A file system with a journal keeps the first few, one without any of them.
    const bool journal = random.chance(50);
    const std::uint64_t applied = random.below(operations_.size() + 1);
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      if (journal ? i < applied : random.chance(50)) operations_[i](names);
    }
    std::map<std::string, FileBytes> out;
    for (const auto& [path, node] : names) {
      FileBytes bytes = node->durable;
      bytes.resize(random.chance(50) ? node->now.size() : std::min(node->now.size(), node->durable.size()));
      constexpr std::size_t kPage = 512;
      for (std::size_t at = 0; at < bytes.size(); at += kPage) {
        if (!random.chance(50)) continue;
        const std::size_t end = std::min({at + kPage, bytes.size(), node->now.size()});
        for (std::size_t i = at; i < end; ++i) bytes[i] = node->now[i];
      }
      out[path.substr(2)] = std::move(bytes);
    }
    return out;
  }

  // ---- FileSystem
  int open(const std::string& path, int flags, unsigned) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("open", path, true)) return -error;
    if ((flags & O_DIRECTORY) != 0) return made_ ? keep({nullptr, path}) : -ENOENT;
    if (!made_) return -ENOENT;
    auto at = names_.find(path);
    if (at == names_.end()) {
      if ((flags & O_CREAT) == 0) return -ENOENT;
      auto node = std::make_shared<Node>();
      at = names_.emplace(path, node).first;
      operations_.push_back([path, node](Names& names) { names[path] = node; });
    }
    if ((flags & O_TRUNC) != 0) at->second->now.clear();
    return keep({at->second, path});
  }
  void close(int fd) override {
    const std::lock_guard lock(mutex_);
    locks_.erase(fd);
    open_.erase(fd);
  }
  std::int64_t pread(int fd, std::span<std::byte> target, std::uint64_t offset) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("read", open_.at(fd).path, true)) return -error;
    const FileBytes& bytes = open_.at(fd).node->now;
    if (offset >= bytes.size()) return 0;
    const std::size_t count = std::min({target.size(), bytes.size() - static_cast<std::size_t>(offset), piece_max});
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), count, target.begin());
    return static_cast<std::int64_t>(count);
  }
  std::int64_t pwrite(int fd, std::span<const std::byte> source, std::uint64_t offset) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("write", open_.at(fd).path, true)) return -error;
    FileBytes& bytes = open_.at(fd).node->now;
    std::size_t count = std::min(source.size(), piece_max);
    std::uint64_t used = 0;
    for (const auto& [path, node] : names_) used += node->now.size();
    const std::uint64_t end = offset + count;
    if (end > bytes.size() && used + (end - bytes.size()) > room) {
      const std::uint64_t left = room > used ? room - used : 0;
      if (left == 0 || offset > bytes.size()) return -ENOSPC;
      count = static_cast<std::size_t>(bytes.size() + left - offset);
    }
    if (offset + count > bytes.size()) bytes.resize(static_cast<std::size_t>(offset) + count);
    std::copy_n(source.begin(), count, bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    return static_cast<std::int64_t>(count);
  }
  std::int64_t size(int fd) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("fstat", open_.at(fd).path, false)) return -error;
    return static_cast<std::int64_t>(open_.at(fd).node->now.size());
  }
  int truncate(int fd, std::uint64_t size) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("cut", open_.at(fd).path, false)) return -error;
    open_.at(fd).node->now.resize(static_cast<std::size_t>(size));
    return 0;
  }
  int sync(int fd) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("fsync", open_.at(fd).path, true)) return -error;
    if (const auto& node = open_.at(fd).node) {
      node->durable = node->now;
    } else {
      durable_names_ = names_;
      operations_.clear();
    }
    return 0;
  }
  void start_writing(int, std::uint64_t, std::uint64_t) override {}
  int rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("rename", from, false)) return -error;
    const auto at = names_.find(from);
    if (at == names_.end()) return -ENOENT;
    const auto move = [from, to](Names& names) {
      const auto there = names.find(from);
      if (there == names.end()) return;
      auto node = there->second;
      names.erase(there);
      names[to] = std::move(node);
    };
    move(names_);
    operations_.push_back(move);
    return 0;
  }
  int unlink(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("unlink", path, false)) return -error;
    if (names_.erase(path) == 0) return -ENOENT;
    operations_.push_back([path](Names& names) { names.erase(path); });
    return 0;
  }
  int make_directory(const std::string& path, unsigned) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("mkdir", path, false)) return -error;
    if (made_) return -EEXIST;
    made_ = true;
    return 0;
  }
  int list(const std::string& path, std::vector<std::string>& names) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("list", path, false)) return -error;
    if (!made_) return -ENOENT;
    for (const auto& [name, node] : names_) names.push_back(name.substr(2));
    return 0;
  }
  int lock(int fd, bool exclusive) override {
    const std::lock_guard lock(mutex_);
    if (const int error = enter("lock", open_.at(fd).path, false)) return -error;
    for (const auto& [other, how] : locks_) {
      if (open_.at(other).node == open_.at(fd).node && other != fd && (how || exclusive)) return -EWOULDBLOCK;
    }
    locks_[fd] = exclusive;
    return 0;
  }
  void unlock(int fd) override {
    const std::lock_guard lock(mutex_);
    locks_.erase(fd);
  }
  std::int64_t free_bytes(const std::string&) override { return 12345; }

  std::size_t open_count() const { return open_.size(); }

 private:
  struct Node {
    FileBytes now, durable;
  };
  using Names = std::map<std::string, std::shared_ptr<Node>>;
  struct Open {
    std::shared_ptr<Node> node;  // none: the directory
    std::string path;
  };
  int enter(const std::string& call, const std::string& path, bool may_interrupt) {
    if (dead()) return EIO;
    ++calls_;
    if (dead()) return EIO;
    if (refuse) {
      if (const int error = refuse(call, path)) return error;
    }
    if (may_interrupt && interrupts && (interrupted_ = !interrupted_)) return EINTR;
    return 0;
  }
  int keep(Open open) {
    open_.emplace(next_, std::move(open));
    return next_++;
  }

  mutable std::mutex mutex_;
  bool made_ = false;
  bool interrupted_ = false;
  std::uint64_t calls_ = 0;
  Names names_, durable_names_;
  std::vector<std::function<void(Names&)>> operations_;  // on names since the directory was synced
  std::map<int, Open> open_;
  std::map<int, bool> locks_;
  int next_ = 3;
};

}  // namespace paramwire::testing
