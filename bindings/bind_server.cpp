#include "calls.hpp"
#include "convert.hpp"
#include "metrics.hpp"
#include "module.hpp"
#include "publish.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/server/server.hpp"

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::bindings {

namespace {

// A publish of the server's own process in the form that clients have. No call of it waits, so none looks at `options`.
class LocalPublisher final : public Publisher {
 public:
  LocalPublisher(std::shared_ptr<Server> server, LocalPublish publish) : server_(std::move(server)), publish_(std::move(publish)), version_(publish_.version()) {}
  Version version() const noexcept override { return version_; }
  Status remove(std::string_view tensor, CallOptions) override { return publish_.remove(tensor); }
  Status alias(std::string_view tensor, std::string_view target, CallOptions) override { return publish_.alias(tensor, target); }
  Result<Version> finish(CallOptions) override { return publish_.finish(); }
  void abort() override { publish_.abort(); }

 protected:
  Status put_stored(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, CodecId codec, std::span<const std::byte> bytes, CallOptions) override {
    return publish_.put({tensor, dtype, shape, part, codec, bytes.size()}, bytes);
  }

 private:
  std::shared_ptr<Server> server_;  // shared with PyServer and with calls that were interrupted
  LocalPublish publish_;
  Version version_;
};

class PyServer {
 public:
  explicit PyServer(const ServerOptions& options)
      : server_(take(interruptible([options]() -> Result<std::shared_ptr<Server>> {
          PARAMWIRE_TRY(server, Server::open(options));
          return std::shared_ptr<Server>(std::move(server));
        }))) {}
  ~PyServer() {
    without_gil([this] { server_.reset(); });
  }

  std::vector<std::string> endpoints() const {
    std::vector<std::string> out;
    for (const Endpoint& endpoint : server_->endpoints()) out.push_back(endpoint.to_string());
    return out;
  }
  std::vector<std::uint16_t> udp_ports() const { return server_->udp_ports(); }
  std::string address() const {
    for (const Endpoint& endpoint : server_->endpoints()) {
      if (endpoint.kind == Endpoint::Kind::kUnix) return endpoint.to_string();
    }
    return server_->endpoints().front().to_string();
  }
  std::uint32_t epoch() const { return server_->epoch(); }
  std::string incarnation() const { return server_->incarnation().to_string(); }
  py::object newest() const {
    return version_object(without_gil([this] { return server_->newest(); }));
  }
  std::unique_ptr<PyPublish> publish(py::handle base, py::handle codec, py::handle threads, py::object self) const {
    const PublishOptions options = publish_options(base, codec, threads, py::none());
    auto started = take(without_gil([&] { return server_->publish(options.any_base, options.base); }));
    auto publisher = std::make_unique<LocalPublisher>(server_, std::move(started));
    publisher->set_codec(options.codec, encode_threads(options));
    return std::make_unique<PyPublish>(std::move(publisher), false, std::nullopt, counters_, std::move(self));
  }
  py::dict stats() const {
    const ServerStats stats = take(without_gil([this] { return server_->stats(); }));
    const StoreStats& store = stats.store;
    const std::pair<const char*, std::uint64_t> counts[] = {
        {"blocks", store.blocks},
        {"raw_bytes", store.raw_bytes},
        {"versions_readable", store.versions_readable},
        {"leases", store.leases},
        {"publishes_open", store.publishes_open},
        {"slots_in_use", store.slots_in_use},
        {"used_bytes", store.used_bytes},
        {"committed_bytes", store.committed_bytes},
        {"limit_bytes", store.limit_bytes},
        {"superseded_slots", store.superseded_slots},
        {"quarantined_slots", store.quarantined_slots},
        {"quarantined_bytes", store.quarantined_bytes},
        {"publishes", store.publishes},
        {"publishes_refused", store.publishes_refused},
        {"leases_revoked", store.leases_revoked},
        {"slots_reclaimed", store.slots_reclaimed},
        {"connections", stats.connections},
        {"accepted", stats.accepted},
        {"refused", stats.refused},
        {"closed_for_protocol", stats.closed_for_protocol},
        {"closed_for_key", stats.closed_for_key},
        {"closed_for_stall", stats.closed_for_stall},
        {"loop_turns", stats.loop_turns},
        {"pin_tables", stats.pin_tables},
        {"deltas_made", stats.deltas.made},
        {"deltas_useless", stats.deltas.useless},
        {"deltas_kept", stats.deltas.kept},
        {"deltas_kept_bytes", stats.deltas.kept_bytes},
        {"deltas_sent", stats.deltas.sent},
        {"deltas_sent_bytes", stats.deltas.sent_bytes},
        {"deltas_waiting", stats.deltas.waiting},
        {"copies", counters_->copies},
    };
    py::dict out;
    for (const auto& [name, count] : counts) out[name] = count;
    out["tier_note"] = stats.tier_note;
    const UdpServerStats& udp = stats.udp;
    const std::pair<const char*, std::uint64_t> datagrams[] = {
        {"udp_sessions", udp.sessions},
        {"udp_received", udp.received},
        {"udp_malformed", udp.malformed},
        {"udp_unauthentic", udp.unauthentic},
        {"udp_replayed", udp.replayed},
        {"udp_answered", udp.answered},
        {"udp_tokens", udp.tokens},
        {"udp_refused", udp.refused},
        {"udp_segments", udp.segments},
        {"udp_bytes", udp.bytes},
        {"udp_dropped", udp.dropped},
        {"udp_too_long", udp.too_long},
        {"udp_failed", udp.failed},
        {"udp_gso_disabled", udp.gso_disabled},
        {"udp_socket_drops", udp.socket_drops},
        {"udp_busy_poll_us", udp.busy_poll_us},
    };
    for (const auto& [name, count] : datagrams) out[name] = count;
    const VerbsServerStats& verbs = stats.verbs;
    const std::pair<const char*, std::uint64_t> rdma[] = {
        {"verbs_devices", verbs.devices},
        {"verbs_queue_pairs", verbs.queue_pairs},
        {"verbs_opened", verbs.opened},
        {"verbs_refused", verbs.refused},
        {"verbs_regions", verbs.regions},
        {"verbs_region_bytes", verbs.region_bytes},
    };
    for (const auto& [name, count] : rdma) out[name] = count;
    out["no_verbs"] = stats.no_verbs;
    return out;
  }
  py::dict durations() const { return durations_dict(take(server_->durations())); }
  void close(double drain) {
    const Micros span = micros_required(drain, "drain");
    interruptible([server = server_, closing = closing_, span] {
      const std::lock_guard lock(*closing);
      server->close(span);
      return true;
    });
  }

 private:
  std::shared_ptr<Server> server_;  // shared with its publishes, and with a close() that was interrupted
  std::shared_ptr<std::mutex> closing_ = std::make_shared<std::mutex>();
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

TierOptions::HugePages huge_pages_from(const std::string& word) {
  if (word == "no") return TierOptions::HugePages::kNo;
  if (word == "try") return TierOptions::HugePages::kTry;
  if (word == "require") return TierOptions::HugePages::kRequire;
  raise_invalid(cat("huge_pages is \"", word, "\": known are no, try, require"));
}

std::unique_ptr<PyServer> open_server(const std::vector<std::string>& listen, const std::filesystem::path& unix_directory, const std::optional<std::filesystem::path>& state,
                                      std::optional<std::uint64_t> memory_limit, std::optional<std::uint64_t> arena_bytes, const std::string& huge_pages,
                                      const std::string& tier, double lease_ttl_max, double lease_age_max, std::uint32_t retained,
                                      std::optional<std::uint64_t> quarantine_limit, bool udp, bool busy_poll, std::shared_ptr<Trace> trace,
                                      const std::optional<std::filesystem::path>& key, const std::string& verbs, std::optional<std::uint32_t> verbs_gid_index,
                                      std::uint64_t delta_limit, std::uint32_t epoch_after) {
  ServerOptions options;
  options.deltas.bytes_max = delta_limit;
  options.epoch_after = epoch_after;
  options.verbs = verbs;
  options.verbs_gid_index = verbs_gid_index;
  options.udp = udp;
  options.udp_busy_poll = busy_poll;
  options.listen = listen;
  if (key) options.key_file = key_path(*key);
  options.unix_directory = unix_directory.string();
  if (state) options.coordinator = cat("memory:", state->string());
  if (memory_limit) options.tier_options.limit_bytes = *memory_limit;
  if (arena_bytes) options.tier_options.arena_bytes = *arena_bytes;
  options.tier_options.huge_pages = huge_pages_from(huge_pages);
  options.tier = tier;
  options.store.lease_ttl_max = micros_required(lease_ttl_max, "lease_ttl_max");
  options.store.lease_age_max = micros_required(lease_age_max, "lease_age_max");
  if (retained == 0) raise_invalid("retained is 0: at least the newest version must stay readable");
  options.store.retained_versions = retained;
  if (quarantine_limit) options.store.quarantine_bytes_max = *quarantine_limit;
  options.trace = std::move(trace);
  return std::make_unique<PyServer>(options);
}

}  // namespace

void bind_server(py::module_& module) {
  py::class_<PyServer>(module, "Server")
      .def(py::init(&open_server), py::arg("listen"), py::kw_only(), py::arg("unix_directory"), py::arg("state") = py::none(),
           py::arg("memory_limit") = py::none(), py::arg("arena_bytes") = py::none(), py::arg("huge_pages") = "no", py::arg("tier") = "memory",
           py::arg("lease_ttl_max") = 60.0, py::arg("lease_age_max") = 600.0, py::arg("retained") = 3, py::arg("quarantine_limit") = py::none(),
           py::arg("udp") = true, py::arg("busy_poll") = false, py::arg("trace") = py::none(), py::arg("key") = py::none(),
           py::arg("verbs") = "auto", py::arg("verbs_gid_index") = py::none(), py::arg("delta_limit") = DeltaOptions().bytes_max, py::arg("epoch_after") = 0U)
      .def_property_readonly("address", &PyServer::address)
      .def_property_readonly("endpoints", &PyServer::endpoints)
      .def_property_readonly("udp_ports", &PyServer::udp_ports)
      .def_property_readonly("epoch", &PyServer::epoch)
      .def_property_readonly("incarnation", &PyServer::incarnation)
      .def_property_readonly("newest", &PyServer::newest)
      .def("publish", [](py::object self, py::handle base, py::handle codec, py::handle threads) { return self.cast<PyServer&>().publish(base, codec, threads, self); },
           py::arg("base") = py::ellipsis(), py::kw_only(), py::arg("codec") = py::none(), py::arg("encode_threads") = py::none())
      .def("stats", &PyServer::stats)
      .def("durations", &PyServer::durations)
      .def("close", &PyServer::close, py::arg("drain") = 5.0)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyServer& self, const py::object& type, const py::object&, const py::object&) { self.close(type.is_none() ? 5.0 : 0.0); },
           py::arg("type"), py::arg("value"), py::arg("traceback"));
}

}  // namespace paramwire::bindings
