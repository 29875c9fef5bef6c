#include "paramwire/client/client.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/client/client_impl.hpp"
#include "paramwire/net/publish_link.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

namespace paramwire {

// ---------------------------------------------------------------- ticket

bool Ticket::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

Status Ticket::wait(CallOptions options) {
  std::unique_lock lock(state_->mutex);
  const Micros until = options.timeout ? steady_clock().now() + *options.timeout : state_->deadline;
  if (!state_->finished.wait_until(lock, time_point(until), [this] { return state_->done; })) {
    return Error(Code::kTimeout, cat("a ticket of ", state_->requests.size(), " requests is not done in time; it goes on, keep its targets"));
  }
  return state_->result;
}

double Ticket::seconds() const {
  const std::lock_guard lock(state_->mutex);
  return state_->done ? static_cast<double>(state_->completed - state_->submitted) / static_cast<double>(kMicrosPerSecond) : 0.0;
}

// ---------------------------------------------------------------- snapshot

Snapshot::~Snapshot() { close(); }

void Snapshot::close() {
  if (state_->closed.exchange(true)) return;
  if (state_->lease != 0 && !state_->lease_lost) state_->client->release_lease(state_->lease, state_->held->incarnation());
}

Version Snapshot::version() const noexcept { return *state_->held->manifest().version(); }
const Manifest& Snapshot::manifest() const noexcept { return state_->held->manifest(); }
std::uint64_t Snapshot::decode_memory_bytes() const { return state_->client->decode_memory_bytes(); }
const ClientOptions& Snapshot::client_options() const noexcept { return state_->client->options(); }
bool Snapshot::leased() const noexcept { return state_->lease != 0 && !state_->lease_lost; }

namespace {

void add_block(TensorEntry& out, const ManifestEntry& block) {
  ++out.blocks;
  out.version = std::max(out.version, block.version);
  out.stored_bytes += block.stored_size;
  if (block.codec != CodecId::kRaw) out.codec = block.codec;
}

TensorEntry summarise(std::string name, const std::vector<Manifest::Hit>& hits) {
  TensorEntry out;
  const ManifestEntry& first = hits.front().entry;
  out.dtype = first.dtype;
  out.shape = first.shape;
  out.bytes = tensor_bytes(first.dtype, first.shape);
  for (const Manifest::Hit& hit : hits) add_block(out, hit.entry);
  if (first.tensor != name) out.alias_of = first.tensor;
  out.name = std::move(name);
  return out;
}

}  // namespace

std::vector<TensorEntry> Snapshot::tensors() const {
  std::map<std::string_view, TensorEntry> by_name;
  std::vector<std::string> aliases;
  manifest().for_each([&](const Manifest::Hit& hit) {
    const ManifestEntry& entry = hit.entry;
    if (entry.kind == EntryKind::kAlias) {
      aliases.emplace_back(entry.tensor);
      return true;
    }
    auto [it, fresh] = by_name.try_emplace(entry.tensor);
    if (fresh) {
      it->second = summarise(std::string(entry.tensor), {hit});
    } else {
      add_block(it->second, entry);
    }
    return true;
  });
  std::vector<TensorEntry> out;
  for (auto& [name, entry] : by_name) out.push_back(std::move(entry));
  for (const std::string& alias : aliases) {
    if (auto entry = find(alias); entry.ok()) out.push_back(std::move(*entry));
  }
  std::sort(out.begin(), out.end(), [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  return out;
}

Result<TensorEntry> Snapshot::find(std::string_view tensor) const {
  PARAMWIRE_TRY(hits, state_->held->blocks(tensor));
  return summarise(std::string(tensor), hits);
}

Result<Snapshot::Layout> Snapshot::layout(std::string_view tensor, const Shard& part) const {
  PARAMWIRE_TRY(hits, state_->held->blocks(tensor));
  const ManifestEntry& entry = hits.front().entry;
  const auto named = [&](const Error& error) { return Error(error.code(), cat("tensor \"", tensor, "\": ", error.message())); };
  auto shape = shard_shape(entry.shape, part);
  if (!shape.ok()) return named(shape.error());
  auto bytes = block_bytes(entry.dtype, entry.shape, part);
  if (!bytes.ok()) return named(bytes.error());
  return Layout{entry.dtype, *shape, *bytes};
}

Result<Snapshot::Layout> Snapshot::layout(BlockId block) const {
  const auto hit = manifest().find(block);
  if (!hit || hit->entry.kind != EntryKind::kBlock) return Error(Code::kNotFound, cat("block ", block, " is not in version ", version()));
  PARAMWIRE_TRY(shape, shard_shape(hit->entry.shape, hit->entry.shard));
  return Layout{hit->entry.dtype, shape, hit->entry.raw_size};
}

Result<Snapshot::Identity> Snapshot::identity(std::string_view tensor, const Shard& part) const {
  PARAMWIRE_TRY(block, state_->held->locate(tensor, part));
  const ManifestEntry& entry = block.entry;
  return Identity{entry.codec, entry.stored_size, entry.crc64, entry.extent_table_crc};
}

Result<std::vector<std::uint64_t>> Snapshot::row_cuts(std::string_view tensor) const {
  PARAMWIRE_TRY(hits, state_->held->blocks(tensor));
  std::vector<std::uint64_t> cuts;
  for (const Manifest::Hit& hit : hits) cuts.push_back(shard_rows(hit.entry.shape, hit.entry.shard)->first);
  return cuts;
}

Status Snapshot::fetch(std::span<FetchRequest> requests, CallOptions options) {
  PARAMWIRE_CHECK(state_->client->check_usable());
  if (state_->closed) return Error(Code::kInvalid, cat("the snapshot of version ", version(), " is closed"));
  auto held = state_->held;
  Status status = state_->client->fetch(FetchMachine::Mode::kSnapshot, held, requests, state_->client->deadline(options.timeout));
  if (!status.ok() && status.error().code() == Code::kStale && state_->lease_lost) {
    return Error(Code::kStale, cat(status.error().message(), "; its lease was lost before"));
  }
  return status;
}

Result<Ticket> Snapshot::fetch_async(std::vector<FetchRequest> requests, CallOptions options) {
  PARAMWIRE_CHECK(state_->client->check_usable());
  if (state_->closed) return Error(Code::kInvalid, cat("the snapshot of version ", version(), " is closed"));
  return state_->client->submit(state_, std::move(requests), state_->client->deadline(options.timeout));
}

namespace {
Status viewable(const BlockRead& what) {
  if (what.entry.codec == CodecId::kRaw) return {};
  return Error(Code::kUnavailable, cat("block ", what.entry.to_string(), " is stored as ", codec_name(what.entry.codec), ": a view shows stored bytes, fetch decodes them"));
}
}  // namespace

Result<BlockView> Snapshot::view(std::string_view tensor, const Shard& part) {
  PARAMWIRE_CHECK(state_->client->check_usable());
  if (state_->closed) return Error(Code::kInvalid, cat("the snapshot of version ", version(), " is closed"));
  PARAMWIRE_TRY(what, state_->held->locate(tensor, part));
  PARAMWIRE_CHECK(viewable(what));
  return state_->client->view(*state_->held, what);
}

Result<BlockView> Snapshot::view(BlockId block) {
  PARAMWIRE_CHECK(state_->client->check_usable());
  if (state_->closed) return Error(Code::kInvalid, cat("the snapshot of version ", version(), " is closed"));
  PARAMWIRE_TRY(what, state_->held->locate(block));
  PARAMWIRE_CHECK(viewable(what));
  return state_->client->view(*state_->held, what);
}

// ---------------------------------------------------------------- publisher

namespace {
// Of encoding where nothing else was asked for: a publish shares its machine with a server.
constexpr unsigned kThreadsMax = 4;
}  // namespace

unsigned encode_threads(const PublishOptions& options) noexcept {
  return options.encode_threads ? std::max(1U, *options.encode_threads) : std::clamp(std::thread::hardware_concurrency(), 1U, kThreadsMax);
}

Status Publisher::put(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, std::span<const std::byte> bytes, const CodecSpec& codec,
                      CallOptions options) {
  const auto name = [&](const Error& error) { return Error(error.code(), cat("tensor \"", tensor, "\": ", error.message())); };
  auto size = block_bytes(dtype, shape, part);
  if (!size.ok()) return name(size.error());
  if (*size != bytes.size()) {
    return Error(Code::kInvalid, cat("tensor \"", tensor, "\": ", dtype_name(dtype), ' ', shape, ' ', part, " has ", *size, " bytes, ", bytes.size(), " were given"));
  }
  auto stored = encoder_.encode(codec, dtype, bytes, threads_);
  if (!stored.ok()) return name(stored.error());
  totals_.given_bytes += bytes.size();
  totals_.stored_bytes += stored->bytes.size();
  totals_.overflowed += stored->overflowed;
  return put_stored(tensor, stored->dtype, shape, part, stored->codec, stored->bytes, options);
}

namespace {

// abort() waits no longer than this for the server to take notice: an idle publish ends by itself.
constexpr Micros kGoodbye = kMicrosPerSecond / 5;

class RemotePublisher final : public Publisher {
 public:
  RemotePublisher(std::shared_ptr<ClientImpl> client, std::unique_ptr<PublishLink> link) : client_(std::move(client)), link_(std::move(link)) {}
  Version version() const noexcept override { return link_->version(); }

  Status remove(std::string_view tensor, CallOptions options) override { return link_->remove(tensor, client_->deadline(options.timeout)); }
  Status alias(std::string_view tensor, std::string_view target, CallOptions options) override {
    return link_->alias(tensor, target, client_->deadline(options.timeout));
  }
  Result<Version> finish(CallOptions options) override { return link_->finish(client_->deadline(options.timeout)); }
  void abort() override { static_cast<void>(link_->abort(steady_clock().now() + kGoodbye).ok()); }

 protected:
  Status put_stored(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, CodecId codec, std::span<const std::byte> bytes,
                    CallOptions options) override {
    return link_->put({tensor, dtype, shape, part, codec}, bytes, client_->deadline(options.timeout));
  }

 private:
  std::shared_ptr<ClientImpl> client_;
  std::unique_ptr<PublishLink> link_;
};

}  // namespace

// ---------------------------------------------------------------- client

Result<std::shared_ptr<Client>> Client::connect(std::string_view address, const ClientOptions& options) {
  PARAMWIRE_TRY(endpoint, parse_endpoint(address));
  PARAMWIRE_CHECK(Paths::check(options));
  if (options.lease_ttl < 30'000) return Error(Code::kInvalid, cat("lease_ttl of ", options.lease_ttl, " us: at least 30 ms are needed to renew it in time"));
  PARAMWIRE_TRY(high, system_random());
  PARAMWIRE_TRY(low, system_random());
  PARAMWIRE_TRY(tls, open_tls(options.key_file, options.key, TlsEnd::kClient));
  auto impl = std::make_shared<ClientImpl>(std::move(endpoint), options, Caller(ClientId{high, low}, std::move(tls)));
  PARAMWIRE_CHECK(impl->open(impl->deadline({})));
  return std::shared_ptr<Client>(new Client(std::move(impl)));
}

Client::~Client() { close(); }

Result<std::shared_ptr<Snapshot>> Client::snapshot(const SnapshotOptions& options) {
  PARAMWIRE_CHECK(impl_->check_usable());
  const Micros until = impl_->deadline(options.timeout);
  const Micros ttl = options.lease ? impl_->options().lease_ttl : 0;
  auto opened = impl_->open_snapshot(options.version, ttl, options.wait, until);
  // One repeat on a fresh connection: a server that restarted while nobody asked is the usual case.
  if (!opened.ok() && opened.error().code() == Code::kUnreachable && steady_clock().now() < until) {
    opened = impl_->open_snapshot(options.version, ttl, options.wait, until);
  }
  if (!opened.ok()) return std::move(opened).error();
  auto state = std::make_shared<Snapshot::State>();
  state->client = impl_;
  state->held = std::move(opened->held);
  state->lease = opened->lease;
  state->lease_deadline = opened->lease_deadline;
  const std::shared_ptr<Snapshot> snapshot(new Snapshot(state));  // from here on, every way out ends the lease
  if (state->lease != 0) PARAMWIRE_CHECK(impl_->watch_lease(state));
  return snapshot;
}

Result<Version> Client::fetch(std::span<FetchRequest> requests, CallOptions options) {
  PARAMWIRE_CHECK(impl_->check_usable());
  std::shared_ptr<const HeldManifest> held;
  PARAMWIRE_CHECK(impl_->fetch(FetchMachine::Mode::kNewest, held, requests, impl_->deadline(options.timeout)));
  return *held->manifest().version();
}

Result<std::unique_ptr<Publisher>> Client::publish(const PublishOptions& options) {
  PARAMWIRE_CHECK(impl_->check_usable());
  const Micros until = impl_->deadline(options.timeout);
  PARAMWIRE_TRY(link, PublishLink::start(impl_->endpoint(), impl_->caller(), options.any_base, options.base, until));
  auto publisher = std::make_unique<RemotePublisher>(impl_, std::move(link));
  publisher->set_codec(options.codec, encode_threads(options));
  return std::unique_ptr<Publisher>(std::move(publisher));
}

Result<std::vector<std::pair<std::string, std::uint64_t>>> Client::server_stats(CallOptions options) {
  PARAMWIRE_CHECK(impl_->check_usable());
  PARAMWIRE_TRY(answer, impl_->call([](std::uint64_t request) { return encode_empty(FrameType::kStat, request); }, FrameType::kStats,
                                    impl_->deadline(options.timeout)));
  PARAMWIRE_TRY(stats, StatsMessage::decode(answer.meta));
  return std::move(stats.values);
}

Result<BufferRegistration> Client::register_buffer(std::span<std::byte> buffer) {
  PARAMWIRE_CHECK(impl_->check_usable());
  const std::shared_ptr<VerbsNode> node = impl_->verbs();
  PARAMWIRE_TRY(id, node->add(buffer));
  return BufferRegistration([node, id] { node->remove(id); });
}

ClientStats Client::stats() const { return impl_->stats(); }
NamedHistograms Client::durations() const { return impl_->durations(); }
const ClientOptions& Client::options() const noexcept { return impl_->options(); }
std::string Client::address() const { return impl_->endpoint().to_string(); }
Incarnation Client::incarnation() const { return impl_->incarnation(); }
void Client::close() { impl_->close(); }

}  // namespace paramwire
