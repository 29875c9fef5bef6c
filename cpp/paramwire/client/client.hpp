// The client: snapshots of a server's parameters, fetched block by block, verified.
//
//   auto client = Client::connect("tcp://127.0.0.1:7411", {});
//   auto snapshot = (*client)->snapshot({});
//   std::vector<float> w(...);
//   FetchRequest want{.tensor = "blk.0.attn_q.weight", .target = std::as_writable_bytes(std::span(w))};
//   Status ok = (*snapshot)->fetch(std::span(&want, 1), {});
//
// Every call has a deadline: its own `timeout`, or the client's. Nothing is retried past it, nothing spins.
// After fork() a client works in the parent only; the child gets kInvalid.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/extent_check.hpp"
#include "paramwire/base/metrics.hpp"
#include "paramwire/base/trace.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/codec/payload.hpp"
#include "paramwire/net/cluster_key.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/wire/manifest.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire {

class VerbsApi;

struct ClientOptions {
  std::string transport = "auto";            // "auto": the first of shm, verbs, udp, tcp that works, with the reasons in stats(); or one of them, pinned
  std::string small_transport;               // of fetches up to small_bytes: "" as `transport` (with "auto" udp beside tcp), "same", or pinned as above
  std::uint64_t small_bytes = 64 * 1024;     // of all blocks of one fetch together
  bool strict = false;                       // "auto": kUnavailable instead of going on without a transport that should work here
  Micros timeout = 30 * kMicrosPerSecond;    // of calls that bring none
  Micros lease_ttl = 10 * kMicrosPerSecond;  // of leased snapshots; renewed at a third of it by a thread of the client
  bool verify = true;                        // false only to measure a transport bare: then nothing is checked (OmittedReadChecks::crc)
  std::string key_file;                      // the cluster key: a file that ClusterKey::load takes,
  std::shared_ptr<const ClusterKey> key;     // or a loaded one; not both. Both empty: no key, TCP goes without TLS
  bool busy_poll = false;                    // udp, verbs: a fetch spins instead of sleeping; a whole core while it waits
  std::string verbs_device;                  // RDMA device to use, "rx0", or with its port "rx0:1"; empty: chosen by the route to the server
  std::optional<std::uint32_t> verbs_gid_index;  // of that device's port
  std::function<Result<std::shared_ptr<VerbsApi>>()> verbs_library = nullptr;  // for tests: another provider than libibverbs
  std::optional<std::uint32_t> decode_threads;  // beside the caller's, for fetches of encoded blocks; none: processors less one, 4 at most
  bool drop_view_pages = false;              // a released view gives its shared pages back: for readers under a memory budget
  std::shared_ptr<Trace> trace;              // spans of this client and of engines over its snapshots; none: nothing is recorded
};

struct CallOptions {
  std::optional<Micros> timeout;             // none: the client's; 0 or less: kTimeout at once
};

struct SnapshotOptions {
  std::optional<Version> version;            // none: the newest
  bool lease = true;                         // false: optimistic; fetches of old versions may end in kStale
  Micros wait = 0;                           // how long to wait for `version` (or for the first one) to be published
  std::optional<Micros> timeout;
};

// A tensor, or a contiguous row or head range of it, into caller memory of exactly its size.
struct FetchRequest {
  std::string_view tensor;                   // or:
  std::optional<BlockId> block;              // a whole block by id (`tensor` and `part` are then unused)
  Shard part;                                // of the tensor; may span blocks
  std::span<std::byte> target;               // host memory; undefined after an error
  // For a caller who checks CRCs itself, a GPU in its own memory say. Where given, an extent (64 KiB of a block, less at its end) that lies whole in
  // `target` is not summed here; what it must be is in the list, in order of offset, instead. THE BYTES OF THESE EXTENTS ARE UNVERIFIED until the caller
  // has compared all of the list (verify_extents() does so on the host). A mismatch is what kCorrupt is elsewhere: memory or a wire that is bad, on
  // either side; nothing of the request may be used: fetch it again, and if that does not help, from another replica. Everything else is checked as
  // always: that the bytes are of one block and version (never torn by a writer), extents that are only partly wanted, and whole blocks that have no
  // list of CRCs to give: those of one extent or less, encoded ones, and those whose extent table exceeds kMaxTableBytes (8 GiB). These have no entry,
  // so the list may be empty. With `verify` false it is given all the same; what has no entry is then checked by nobody.
  // The call clears the list first, and leaves it empty unless `result` is ok. One of its own for each request; must stay as long as `target`.
  std::vector<ExtentCheck>* checks = nullptr;
  // With `checks`: blocks of the codec `planes` leave their elements' byte planes apart, chunk by chunk, for a caller who puts them together (PlanesApart).
  // Their chunks that lie whole in `target` then have an entry in `checks`, of the bytes as they must be after that; the list here, in order of
  // offset, says which of them have to be put together. Cleared and filled as `checks`.
  std::vector<PlanesApart>* planes = nullptr;
  Status result;                             // set by the call
  bool done = false;                         // set by the call: `result` is final
};

struct TensorEntry {
  std::string name;
  DType dtype = DType::kU8;
  Shape shape;
  std::uint64_t bytes = 0;
  std::uint64_t stored_bytes = 0;            // of all its blocks, which travel
  CodecId codec = CodecId::kRaw;             // of the blocks that are encoded, if any is
  std::uint32_t blocks = 0;                  // 1 unless the tensor is cut in shards
  Version version;                           // of its newest block
  std::string alias_of;                      // empty unless tied to another tensor
};

struct RejectedTransport {
  std::string transport;
  std::string reason;
  bool failed = false;                       // it should work here (same host, offered by the server): what is used instead is a fallback
};

struct ClientStats {
  std::string transport;                     // in use: "shm", "verbs", "udp" or "tcp"
  std::string small_transport;               // in use for fetches up to small_bytes
  std::vector<RejectedTransport> rejected;   // transports not used, in order of preference
  LinkStats link;                            // sums over all links of this client
  std::vector<std::pair<std::string, LinkStats>> by_transport;  // the same, of each in use
  std::uint64_t encoded_bytes = 0;           // stored bytes of encoded blocks that were decoded, in place of
  std::uint64_t decoded_bytes = 0;           // as many raw ones
  std::uint64_t decode_memory_bytes = 0;     // kept for it by this client
  std::uint64_t snapshots = 0;               // manifests opened or refreshed
  std::uint64_t manifest_bytes = 0;          // received for them
  std::uint64_t retries = 0;                 // fetch rounds repeated for a change, a bad CRC or a lost link
  std::uint64_t reconnects = 0;
  std::uint64_t restarts_seen = 0;           // other incarnations met
  std::uint64_t leases_lost = 0;
  std::optional<Version> newest;             // newest version seen
};

class ClientImpl;
class Mirror;

// A ticket of a fetch that runs on the client's fetch thread. The targets and names of its requests must stay until it is
// done. Any thread.
class Ticket {
 public:
  bool done() const;
  // The first error of its requests, or ok. kTimeout when it is not done in time: the fetch goes on, its targets must stay.
  Status wait(CallOptions options = {});
  // Seconds, 0 until done: from submission to completion.
  double seconds() const;

 private:
  friend class ClientImpl;
  friend class Snapshot;
  struct State;
  explicit Ticket(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// One version of the whole model. Any thread. Holds its client open.
class Snapshot {
 public:
  ~Snapshot();  // close(), without waiting for the server's answer
  Version version() const noexcept;
  const Manifest& manifest() const noexcept;
  bool leased() const noexcept;
  const ClientOptions& client_options() const noexcept;
  std::uint64_t decode_memory_bytes() const;  // as ClientStats has it

  // Names, shapes and versions, in name order; aliases included.
  std::vector<TensorEntry> tensors() const;
  // errors: kNotFound naming the tensor and its nearest spelling.
  Result<TensorEntry> find(std::string_view tensor) const;
  // What `fetch` of that part needs: dtype, shape of the part, bytes.
  struct Layout {
    DType dtype = DType::kU8;
    Shape shape;
    std::uint64_t bytes = 0;
  };
  Result<Layout> layout(std::string_view tensor, const Shard& part) const;
  Result<Layout> layout(BlockId block) const;
  // What the stored bytes of the block are known by that holds `part`. Equal identities of the same part, in tensors of equal dtype, shape and
  // cuts: equal bytes, but for a chance of 2^-64 by accident (CRCs stand for no attacker).
  struct Identity {
    CodecId codec = CodecId::kRaw;
    std::uint64_t stored_size = 0, crc64 = 0;
    std::uint32_t extent_table_crc = 0;
    bool operator==(const Identity&) const = default;
  };
  // errors: kNotFound; kInvalid for a part that spans blocks.
  Result<Identity> identity(std::string_view tensor, const Shard& part) const;
  // First rows of the blocks that hold `tensor`, ascending; {0} for a whole one.
  Result<std::vector<std::uint64_t>> row_cuts(std::string_view tensor) const;

  // Fetches all requests into their targets, pipelined; returns the first error, each request has its own.
  // errors: kInvalid for a target of the wrong size (naming both) or a closed snapshot; kNotFound; kStale when the lease was
  //         lost, the version is gone, or the server restarted; kCorrupt; kTimeout; kUnreachable.
  Status fetch(std::span<FetchRequest> requests, CallOptions options = {});
  // The same on the client's fetch thread. errors: kBackpressure when 1024 tickets wait.
  Result<Ticket> fetch_async(std::vector<FetchRequest> requests, CallOptions options = {});
  // Zero-copy view of a part that lies in one block (shm only); stays valid when newer versions are published, after close(),
  // and after the server died.
  // errors: kUnavailable on transports without views; kInvalid for a part that spans blocks; as fetch.
  Result<BlockView> view(std::string_view tensor, const Shard& part = Shard::whole());
  Result<BlockView> view(BlockId block);

  // Ends the lease. Idempotent. Tickets in flight end with kStale or complete.
  void close();

 private:
  friend class ClientImpl;
  friend class Client;
  friend class Mirror;
  friend class Ticket;
  struct State;
  explicit Snapshot(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// A publish from this process. One thread. The destructor aborts what was not finished.
class Publisher {
 public:
  virtual ~Publisher() = default;
  virtual Version version() const noexcept = 0;  // that finish will commit, if nobody is faster
  // Stages one block: `bytes` of exactly the part's size, in row-major order, little-endian. Cast and encoded as `codec` says, here, once for all
  // who will fetch it; stored raw where that would not make it smaller.
  Status put(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, std::span<const std::byte> bytes, const CodecSpec& codec,
             CallOptions options = {});
  // With set_codec()'s.
  Status put(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, std::span<const std::byte> bytes, CallOptions options = {}) {
    return put(tensor, dtype, shape, part, bytes, codec_, options);
  }
  const CodecSpec& codec() const noexcept { return codec_; }
  void set_codec(const CodecSpec& codec, unsigned threads) noexcept {
    codec_ = codec;
    threads_ = threads;
  }
  // Of what was put so far: bytes as they were given, as they were stored, and values that a cast made infinite.
  struct Totals {
    std::uint64_t given_bytes = 0, stored_bytes = 0, overflowed = 0;
  };
  const Totals& totals() const noexcept { return totals_; }
  virtual Status remove(std::string_view tensor, CallOptions options = {}) = 0;
  virtual Status alias(std::string_view tensor, std::string_view target, CallOptions options = {}) = 0;
  // Commits, at once for all readers; idempotent.
  virtual Result<Version> finish(CallOptions options = {}) = 0;
  virtual void abort() = 0;

 protected:
  // `bytes` are what is stored: raw bytes of exactly the part's size, or what `codec` made of them.
  virtual Status put_stored(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, CodecId codec, std::span<const std::byte> bytes,
                            CallOptions options) = 0;

 private:
  CodecSpec codec_;
  unsigned threads_ = 1;
  PayloadEncoder encoder_;
  Totals totals_;
};

struct PublishOptions {
  bool any_base = true;                      // false: only on top of `base`, so that no update is lost
  std::optional<Version> base;
  std::optional<Micros> timeout;
  CodecSpec codec;                           // of every put that brings none
  std::optional<unsigned> encode_threads;    // the caller's included; none: processors, 4 at most
};
unsigned encode_threads(const PublishOptions& options) noexcept;

// Memory that RDMA READs go straight into while this lives; elsewhere it has no effect. The owner of the bytes keeps them as long. Move-only; may
// outlive the client.
class BufferRegistration {
 public:
  BufferRegistration() = default;
  BufferRegistration(BufferRegistration&& other) noexcept : release_(std::exchange(other.release_, nullptr)) {}
  BufferRegistration& operator=(BufferRegistration&& other) noexcept {
    release();
    release_ = std::exchange(other.release_, nullptr);
    return *this;
  }
  ~BufferRegistration() { release(); }
  // Not while a fetch reads into it. Idempotent.
  void release() noexcept {
    if (release_) std::exchange(release_, nullptr)();
  }

 private:
  friend class Client;
  explicit BufferRegistration(std::function<void()> release) : release_(std::move(release)) {}
  std::function<void()> release_;
};

class Client {
 public:
  // `address`: "tcp://HOST:PORT", "HOST:PORT" or "unix:PATH".
  // errors: kInvalid for a bad address or option (with the position); kUnreachable, kTimeout; kDenied when one side lacks the cluster
  //         key or has another; as ClusterKey::load for the file; kUnavailable when a pinned
  //         transport can't be had, listing every candidate with its reason, or when `strict` one failed that should work.
  static Result<std::shared_ptr<Client>> connect(std::string_view address, const ClientOptions& options);
  ~Client();

  Result<std::shared_ptr<Snapshot>> snapshot(const SnapshotOptions& options);
  // The newest version of each, all of one version: one control round trip, then as Snapshot::fetch; optimistic, then leased.
  Result<Version> fetch(std::span<FetchRequest> requests, CallOptions options = {});
  Result<std::unique_ptr<Publisher>> publish(const PublishOptions& options);
  // Name and value of the server's counters.
  Result<std::vector<std::pair<std::string, std::uint64_t>>> server_stats(CallOptions options = {});

  // Fetch targets inside of `buffer` are then written by the device itself; others go through a staging buffer of 4 MiB a link, with one copy. Worth
  // it for large targets that are fetched into again and again: registering pins the pages, at some milliseconds for 16 MiB.
  // errors: kInvalid for an empty buffer; with verbs in use: kUnavailable for memory that can't be registered, kBackpressure naming RLIMIT_MEMLOCK.
  Result<BufferRegistration> register_buffer(std::span<std::byte> buffer);

  ClientStats stats() const;
  // How long calls took, in ns, failed ones included: "fetch" (of a snapshot, of the newest, and of tickets), "view", "snapshot",
  // "control" (a question to the server and its answer).
  NamedHistograms durations() const;
  const ClientOptions& options() const noexcept;
  std::string address() const;
  Incarnation incarnation() const;
  // Ends leases and threads, in about 200 ms: a ticket that waits for a server that does not answer is left to its deadline.
  // Idempotent. Snapshots of this client give kInvalid from now on; views stay.
  void close();

 private:
  friend class Mirror;
  explicit Client(std::shared_ptr<ClientImpl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<ClientImpl> impl_;
};

}  // namespace paramwire
