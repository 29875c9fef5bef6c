// Deltas between the versions of blocks that a server holds: made once for all clients, by a thread of their own, off the way of fetches and publishes.
//
// Nothing is made before a client that holds older bytes has asked once; from then on, as long as somebody keeps asking, each publish's deltas are
// made as it becomes visible, so that they are there when they are asked for. Kept until their block changes again.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/server/server_stats.hpp"
#include "paramwire/store/block_store.hpp"

#include <condition_variable>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace paramwire {

class DeltaMaker {
 public:
  // `mutex` guards the store and this object. Both outlive it. The thread is started when there is something to make; where the system gives none,
  // nothing is.
  DeltaMaker(std::mutex& mutex, BlockStore& store, const DeltaOptions& options) : mutex_(mutex), store_(store), options_(options) {}
  ~DeltaMaker();  // without the lock; what is being made is finished first

  // All below with the lock held.
  struct Found {
    std::shared_ptr<const Bytes> bytes;  // nullptr: there is none,
    bool pending = false;                // or not yet
  };
  // The delta that brings `block` from `base` to `version`; is made if it can be, and was not yet.
  Found find(BlockId block, Version version, Version base, Micros now);
  // A version became the newest: deltas to what is no longer in it are dropped, and those to what is new are made, if anybody would ask.
  void published(Micros now);
  void sent(std::uint64_t bytes) noexcept;
  DeltaStats stats() const noexcept;

 private:
  struct Key {
    BlockId block;
    Version version, base;
    auto operator<=>(const Key&) const noexcept = default;
  };
  struct Made {
    std::shared_ptr<const Bytes> bytes;  // nullptr: not worth it, or not possible
    bool done = false;
  };
  void want(const Key& key);
  bool readable(BlockId block, Version version) const;
  void loop();
  void make(std::unique_lock<std::mutex>& lock, const Key& key);

  std::mutex& mutex_;
  BlockStore& store_;
  DeltaOptions options_;
  std::condition_variable wake_;
  std::map<Key, Made> deltas_;
  std::deque<Key> queue_;
  std::optional<Micros> asked_;
  DeltaStats counters_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace paramwire
