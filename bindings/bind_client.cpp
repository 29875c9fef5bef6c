#include "calls.hpp"
#include "client.hpp"
#include "metrics.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"

#include <utility>

namespace paramwire::bindings {

PyClient::PyClient(const std::string& address, const ClientOptions& options) : core_(std::make_shared<ClientCore>()) {
  core_->client = take(answering_signals([&] { return Client::connect(address, options); }));
}

PyClient::~PyClient() {
  without_gil([this] { core_.reset(); });
}

std::string PyClient::transport() const { return core_stats().transport; }
std::string PyClient::small_transport() const { return core_stats().small_transport; }

py::list PyClient::rejected() const {
  py::list out;
  for (const RejectedTransport& one : core_stats().rejected) out.append(py::make_tuple(one.transport, one.reason));
  return out;
}

py::list PyClient::fallbacks() const {
  py::list out;
  for (const RejectedTransport& one : core_stats().rejected) {
    if (one.failed) out.append(one.transport);
  }
  return out;
}

std::unique_ptr<PySnapshot> PyClient::snapshot(py::handle version, bool lease, double wait, py::handle timeout, py::object self) {
  SnapshotOptions options;
  if (!version.is_none()) options.version = version_from(version);
  options.lease = lease;
  options.wait = micros_required(wait, "wait");
  options.timeout = micros(timeout, "timeout");
  auto snapshot = take(answering_signals([&] { return core_->client->snapshot(options); }));
  return std::make_unique<PySnapshot>(core_, std::move(snapshot), std::move(self));
}

namespace {

// Runs `work` on an optimistic snapshot of the newest version; if that version goes away meanwhile, on a leased one.
template <typename Work>
py::object on_newest(PyClient& client, py::handle timeout, const py::object& self, Work work) {
  const auto until = [&, begun = steady_clock().now()]() -> py::object {
    if (timeout.is_none()) return py::none();
    const auto span = *micros(timeout, "timeout");
    return py::float_(static_cast<double>(span - (steady_clock().now() - begun)) / static_cast<double>(kMicrosPerSecond));
  };
  try {
    const auto snapshot = client.snapshot(py::none(), false, 0, timeout, self);
    return work(*snapshot, until());
  } catch (py::error_already_set& error) {
    if (!error.matches(py::module_::import("paramwire._core").attr("StaleError"))) throw;
  }
  const auto snapshot = client.snapshot(py::none(), true, 0, until(), self);
  py::object out = work(*snapshot, until());
  snapshot->close();
  return out;
}

}  // namespace

py::object PyClient::fetch(const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::handle stream, py::object self) {
  return on_newest(*this, timeout, self, [&](PySnapshot& snapshot, const py::object& left) { return snapshot.fetch(name, rows, heads, out, left, stream); });
}

py::object PyClient::fetch_many(py::handle names, py::handle timeout, py::handle allow_missing, py::handle stream, py::object self) {
  return on_newest(*this, timeout, self, [&](PySnapshot& snapshot, const py::object& left) { return snapshot.fetch_many(names, left, allow_missing, stream); });
}

std::unique_ptr<PyPublish> PyClient::publish(py::handle base, py::handle codec, py::handle threads, py::handle timeout, py::object self) {
  const PublishOptions options = publish_options(base, codec, threads, timeout);
  using Opened = Result<std::shared_ptr<std::unique_ptr<Publisher>>>;  // a job's value must be copyable
  const auto opened = take(interruptible([core = core_, options]() -> Opened {
    PARAMWIRE_TRY(publisher, core->client->publish(options));
    return std::make_shared<std::unique_ptr<Publisher>>(std::move(publisher));
  }));
  const std::shared_ptr<Counters> counters(core_, &core_->counters);
  return std::make_unique<PyPublish>(std::move(*opened), true, options.timeout, counters, std::move(self));
}

py::dict PyClient::stats() const {
  const ClientStats stats = core_stats();
  const std::pair<const char*, std::uint64_t> counts[] = {
      {"reads", stats.link.reads},
      {"bytes", stats.link.bytes},
      {"wire_bytes", stats.link.wire_bytes},
      {"encoded_bytes", stats.encoded_bytes},
      {"decoded_bytes", stats.decoded_bytes},
      {"decode_memory_bytes", stats.decode_memory_bytes},
      {"blocks_verified", stats.link.blocks_verified},
      {"changed", stats.link.changed},
      {"corrupt", stats.link.corrupt},
      {"views", stats.link.views},
      {"views_verified", stats.link.views_verified},
      {"snapshots", stats.snapshots},
      {"manifest_bytes", stats.manifest_bytes},
      {"retries", stats.retries},
      {"reconnects", stats.reconnects},
      {"restarts_seen", stats.restarts_seen},
      {"leases_lost", stats.leases_lost},
      {"copies", core_->counters.copies},
  };
  py::dict out;
  out["transport"] = stats.transport;
  out["small_transport"] = stats.small_transport;
  out["rejected"] = rejected();
  out["fallbacks"] = py::len(fallbacks());
  py::dict by_transport;
  for (const auto& [name, link] : stats.by_transport) {
    py::dict one;
    one["reads"] = link.reads;
    one["bytes"] = link.bytes;
    one["wire_bytes"] = link.wire_bytes;
    by_transport[text(name)] = one;
  }
  out["by_transport"] = by_transport;
  out["newest"] = version_object(stats.newest);
  for (const auto& [name, count] : counts) out[name] = count;
  const DatagramStats& d = stats.link.datagram;
  const std::pair<const char*, std::uint64_t> datagram_counts[] = {
      {"udp_gets", d.gets},
      {"udp_received", d.received},
      {"udp_bytes_needed", d.bytes_needed},
      {"udp_bytes_asked", d.bytes_asked},
      {"udp_lost", d.lost},
      {"udp_duplicates", d.duplicates},
      {"udp_refused", d.refused},
      {"udp_forged", d.forged},
      {"udp_timeouts", d.timeouts},
      {"udp_socket_drops", d.socket_drops},
      {"udp_send_failures", d.send_failures},
      {"udp_gso_disabled", d.gso_disabled},
      {"udp_busy_poll_us", d.busy_poll_us},
      {"udp_size_steps", d.size_steps},
      {"udp_receive_buffer_bytes", d.receive_buffer_bytes},
      {"udp_receive_buffer_asked_bytes", d.receive_buffer_asked_bytes},
      {"udp_segment_bytes", d.segment_bytes},
      {"udp_window_bytes", d.window_bytes},
      {"udp_round_trip_us", d.round_trip_us},
  };
  for (const auto& [name, count] : datagram_counts) out[name] = count;
  const VerbsStats& v = stats.link.verbs;
  const std::pair<const char*, std::uint64_t> verbs_counts[] = {
      {"verbs_reads", v.reads},
      {"verbs_doorbells", v.doorbells},
      {"verbs_headers", v.headers},
      {"verbs_direct_bytes", v.direct_bytes},
      {"verbs_regions", v.regions},
      {"verbs_control_calls", v.control_calls},
      {"verbs_sleeps", v.sleeps},
      {"verbs_failures", v.failures},
      {"verbs_failed_status", v.failed_status},
      {"verbs_mtu_bytes", v.mtu_bytes},
      {"verbs_slice_bytes", v.slice_bytes},
      {"verbs_reads_on_wire", v.reads_on_wire},
      {"verbs_gid_index", v.gid_index},
      {"verbs_staging_bytes", v.staging_bytes},
  };
  for (const auto& [name, count] : verbs_counts) out[name] = count;
  out["verbs_path"] = stats.link.path;
  return out;
}

std::unique_ptr<PyRegistration> PyClient::register_buffer(py::handle buffer) const {
  auto target = std::make_unique<Target>(buffer);
  if (target->scattered()) raise_invalid(cat("register: ", target->describe(), " is not one run of memory, which a device could write"));
  const std::span<std::byte> bytes = target->bytes();
  auto registration = take(without_gil([&] { return core_->client->register_buffer(bytes); }));
  return std::make_unique<PyRegistration>(std::move(target), std::move(registration));
}

void PyRegistration::release() {
  without_gil([this] { registration_.release(); });
  target_.reset();
}

py::dict PyClient::durations() const { return durations_dict(core_->client->durations()); }

py::dict PyClient::server_stats(py::handle timeout) {
  const CallOptions options{micros(timeout, "timeout")};
  py::dict out;
  for (const auto& [name, count] : take(answering_signals([&] { return core_->client->server_stats(options); }))) out[text(name)] = count;
  return out;
}

void PyClient::close() {
  interruptible([core = core_] {
    const std::lock_guard lock(core->closing);
    core->client->close();
    return true;
  });
}

void bind_client(py::module_& module) {
  const auto none = py::none();
  py::class_<PyRegistration>(module, "Registration", py::is_final())
      .def_property_readonly("nbytes", &PyRegistration::size)
      .def("release", &PyRegistration::release)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyRegistration& self, const py::object&, const py::object&, const py::object&) { self.release(); }, py::arg("type"), py::arg("value"),
           py::arg("traceback"));
  py::class_<PyClient>(module, "Client", py::is_final())
      .def(py::init([](const std::string& address, const std::string& transport, const std::optional<std::string>& small_transport,
                       std::int64_t small_bytes, bool strict, double timeout, double lease_ttl, bool verify, bool busy_poll, bool drop_view_pages,
                       std::shared_ptr<Trace> trace, const std::optional<std::filesystem::path>& key, const std::optional<std::string>& verbs_device,
                       std::optional<std::uint32_t> verbs_gid_index, std::optional<std::uint32_t> decode_threads) {
             ClientOptions options;
             options.decode_threads = decode_threads;
             options.verbs_device = verbs_device.value_or("");
             options.verbs_gid_index = verbs_gid_index;
             options.transport = transport;
             options.small_transport = small_transport.value_or("");
             if (small_bytes < 0) raise_invalid(cat("small_bytes is ", small_bytes, ": a number of bytes, or 0 for none"));
             options.small_bytes = static_cast<std::uint64_t>(small_bytes);
             options.strict = strict;
             options.timeout = micros_required(timeout, "timeout");
             options.lease_ttl = micros_required(lease_ttl, "lease_ttl");
             options.verify = verify;
             options.busy_poll = busy_poll;
             options.drop_view_pages = drop_view_pages;
             options.trace = std::move(trace);
             if (key) options.key_file = key_path(*key);
             return std::make_unique<PyClient>(address, options);
           }),
           py::arg("address"), py::kw_only(), py::arg("transport") = "auto", py::arg("small_transport") = none,
           py::arg("small_bytes") = ClientOptions().small_bytes, py::arg("strict") = false, py::arg("timeout") = 30.0, py::arg("lease_ttl") = 10.0, py::arg("verify") = true,
           py::arg("busy_poll") = false, py::arg("drop_view_pages") = false, py::arg("trace") = none, py::arg("key") = none,
           py::arg("verbs_device") = none, py::arg("verbs_gid_index") = none, py::arg("decode_threads") = none)
      .def_property_readonly("address", &PyClient::address)
      .def_property_readonly("transport", &PyClient::transport)
      .def_property_readonly("small_transport", &PyClient::small_transport)
      .def_property_readonly("rejected", &PyClient::rejected)
      .def_property_readonly("fallbacks", &PyClient::fallbacks)
      .def_property_readonly("newest", &PyClient::newest)
      .def_property_readonly("incarnation", &PyClient::incarnation)
      .def("snapshot",
           [](py::object self, py::handle version, bool lease, double wait, py::handle timeout) {
             return self.cast<PyClient&>().snapshot(version, lease, wait, timeout, self);
           },
           py::arg("version") = none, py::kw_only(), py::arg("lease") = true, py::arg("wait") = 0.0, py::arg("timeout") = none)
      .def("fetch",
           [](py::object self, const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::handle stream) {
             return self.cast<PyClient&>().fetch(name, rows, heads, out, timeout, stream, self);
           },
           py::arg("name"), py::kw_only(), py::arg("rows") = none, py::arg("heads") = none, py::arg("out") = none, py::arg("timeout") = none, py::arg("stream") = none)
      .def("fetch_many",
           [](py::object self, py::handle names, py::handle timeout, py::handle allow_missing, py::handle stream) {
             return self.cast<PyClient&>().fetch_many(names, timeout, allow_missing, stream, self);
           },
           py::arg("names"), py::kw_only(), py::arg("timeout") = none, py::arg("allow_missing") = py::tuple(), py::arg("stream") = none)
      .def("publish", [](py::object self, py::handle base, py::handle codec, py::handle threads, py::handle timeout) {
             return self.cast<PyClient&>().publish(base, codec, threads, timeout, self);
           },
           py::arg("base") = py::ellipsis(), py::kw_only(), py::arg("codec") = none, py::arg("encode_threads") = none, py::arg("timeout") = none)
      .def("register", &PyClient::register_buffer, py::arg("buffer"))
      .def("stats", &PyClient::stats)
      .def("durations", &PyClient::durations)
      .def("server_stats", &PyClient::server_stats, py::kw_only(), py::arg("timeout") = none)
      .def("close", &PyClient::close)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyClient& self, const py::object&, const py::object&, const py::object&) { self.close(); }, py::arg("type"), py::arg("value"),
           py::arg("traceback"));
}

}  // namespace paramwire::bindings
