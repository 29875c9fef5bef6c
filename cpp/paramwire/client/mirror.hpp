// A copy of a server's tensors in this process that is brought from version to version: what did not change stays, and of what did the difference comes
// where the server has it.
//
// For compute nodes that hold weights, and follow somebody who trains them. A node that holds none fetches from snapshots.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/client/client.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace paramwire {

struct MirrorOptions {
  std::vector<std::string> tensors;          // empty: all of each version, aliases included
  bool deltas = true;                        // false: what changed is fetched whole
  Micros delta_wait = kMicrosPerSecond / 2;  // for deltas that the server is still making; what is not there by then is fetched whole
  unsigned threads = 0;                      // that apply deltas, the caller's included; 0: processors, 4 at most
};

struct MirrorStats {
  std::uint64_t updates = 0;         // that brought another version
  std::uint64_t kept_bytes = 0;      // raw bytes of blocks that had not changed
  std::uint64_t deltas = 0;          // blocks brought by one
  std::uint64_t delta_bytes = 0;     // that these took, in place of
  std::uint64_t replaced_bytes = 0;  // as many stored bytes
  std::uint64_t refused = 0;         // deltas that did not fit or were damaged: their blocks were fetched
  std::uint64_t fetched = 0, fetched_bytes = 0;  // blocks fetched whole, and their stored bytes
  std::uint64_t saved_bytes() const noexcept { return replaced_bytes - delta_bytes; }
};

class Mirror {
 public:
  struct Part {                      // of a tensor: one block
    BlockId block;
    Version version;                 // of its manifest entry
    std::uint64_t crc64 = 0;         // of its stored bytes
    std::uint64_t offset = 0, size = 0;  // raw bytes, in the tensor's
  };
  struct Tensor {
    DType dtype = DType::kU8;
    Shape shape;
    Buffer bytes;                    // raw, row-major
    std::vector<Part> parts;         // in row order
    Version version;                 // of the newest part
  };
  // One version, whole. Never changes: an update makes another one, which shares the tensors that did not change.
  struct State {
    Version version;
    Incarnation incarnation;         // whose version that is
    std::map<std::string, std::shared_ptr<const Tensor>, std::less<>> tensors;  // aliases share their target's
  };

  // Fetches the newest version. errors: as Client::snapshot and Snapshot::fetch; kNotFound for a tensor that it lacks.
  static Result<std::unique_ptr<Mirror>> open(std::shared_ptr<Client> client, const MirrorOptions& options, CallOptions call = {});

  // What it holds. Any thread.
  std::shared_ptr<const State> state() const;
  // Brings it to the newest version, all at once: after an error it is what it was. Takes as much memory as changed tensors have, until nobody
  // holds the state before. A delta counts only if it is of exactly the bytes held, and its result has the CRC that it names; for a block that is
  // stored raw that CRC is the manifest's. Any thread; calls take turns.
  // returns: the version it is at.  errors: as open().
  Result<Version> update(CallOptions call = {});
  MirrorStats stats() const;

 private:
  Mirror(std::shared_ptr<Client> client, const MirrorOptions& options) : client_(std::move(client)), options_(options) {}
  class Update;

  const std::shared_ptr<Client> client_;
  const MirrorOptions options_;
  std::mutex turn_;                  // one update at a time
  mutable std::mutex mutex_;         // both below
  std::shared_ptr<const State> state_;
  MirrorStats counters_;
};

}  // namespace paramwire
