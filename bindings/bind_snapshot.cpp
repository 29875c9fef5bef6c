#include "calls.hpp"
#include "client.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace paramwire::bindings {

namespace {

// Fetches up to this size are made by the calling thread: when they don't wait they run at 1 GB/s at least, so that Ctrl-C waits for 64 ms
// at most.
constexpr std::uint64_t kDirectBytes = std::uint64_t{64} << 20;
// And of so many tensors: 10 us each, where they are tiny.
constexpr std::size_t kDirectBlocks = 4096;
// The same for views: only the first of a block reads it, and nothing is copied. 1 GiB is read in 0.1 s.
constexpr std::uint64_t kDirectViewBytes = std::uint64_t{1} << 30;
// Between two looks at the signals, as for other calls that wait.
constexpr Micros kLook = kMicrosPerSecond / 20;

std::string_view utf8(const py::str& name) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<std::size_t>(size)};
}

py::object tensor_info(const TensorEntry& entry) {
  const py::object alias = entry.alias_of.empty() ? py::object(py::none()) : py::object(text(entry.alias_of));
  return python_type("TensorInfo")(text(entry.name), text(dtype_name(entry.dtype)), shape_tuple(entry.shape), entry.bytes, entry.blocks,
                                   version_object(entry.version), alias, text(codec_name(entry.codec)), entry.stored_bytes);
}

// Collects what is wrong with the targets of a fetch_many, to say it at once.
class Problems {
 public:
  void missing(const Error& error) {
    add(error.message());
    ++missing_;
  }
  void add(const std::string& text) {
    text_ += cat(count_ == 0 ? "" : "\n  ", text);
    ++count_;
  }
  void raise_any() const {
    if (count_ == 0) return;
    const Code code = missing_ == count_ ? Code::kNotFound : Code::kInvalid;
    raise(Error(code, count_ == 1 ? text_ : cat(count_, " tensors can't be fetched as asked, nothing was:\n  ", text_)));
  }

 private:
  std::string text_;
  std::size_t count_ = 0;
  std::size_t missing_ = 0;
};

std::string misfit(std::string_view name, const Snapshot::Layout& layout, const std::string& target) {
  return cat("tensor \"", name, "\" is ", dtype_name(layout.dtype), ' ', layout.shape, ", its target ", target);
}

bool any_match(py::handle name, py::handle patterns) {
  const py::object match = py::module_::import("fnmatch").attr("fnmatchcase");
  for (const py::handle pattern : patterns) {
    if (match(name, pattern).cast<bool>()) return true;
  }
  return false;
}

}  // namespace

// ---------------------------------------------------------------- batch

void Batch::add_target(const Snapshot::Layout& layout, py::handle out) {
  FetchRequest& request = requests_->requests.back();
  bytes_ += layout.bytes;
  last_ = nullptr;
  if (out.is_none()) {
    py::array made = new_array(layout.dtype, layout.shape);
    request.target = bytes_of(made);
    one_ = made;
    keep_.append(made);
    return;
  }
  auto target = std::make_unique<Target>(out);
  last_ = target.get();
  keep_.append(out);
  keep_.append(py::capsule(target.release(), [](void* held) { delete static_cast<Target*>(held); }));
  if (last_->scattered()) {
    last_->stage(layout.dtype, layout.shape);
    staged_.push_back(last_);
  }
  request.target = last_->bytes();
  one_ = py::reinterpret_borrow<py::object>(out);
}

void Batch::finish(Counters& counters) {
  // Two threads may wait for one ticket: each copies, so that neither returns before the target is full.
  const std::vector<Target*> targets = staged_;
  for (Target* target : targets) target->finish();
  counters.copies.fetch_add(std::exchange(staged_, {}).size(), std::memory_order_relaxed);
}

DeviceGiven Batch::add_device(std::string_view name, const Shard& part, const Snapshot::Layout& layout, py::handle out) {
  DeviceGiven given = device_call_.take_target("out", out);
  bytes_ += layout.bytes;
  const std::shared_ptr<DeviceWork>& work = device_call_.work(given.ordinal);
  auto& devices = requests_->devices;
  auto found = std::find_if(devices.begin(), devices.end(), [&](const OnDevice& each) { return each.work == work; });
  if (found == devices.end()) found = devices.insert(found, {work, {}});
  found->fetches.push_back({.tensor = requests_->device_names.emplace_back(name), .part = part, .target = given.range});
  keep_.append(out);
  keep_.append(given.keep);
  one_ = py::reinterpret_borrow<py::object>(out);
  return given;
}

void Batch::add(const Snapshot& snapshot, std::string_view name, const Shard& part, py::handle out) {
  const auto layout = take(snapshot.layout(name, part));
  if (bindings::on_device("out", out)) {
    add_device(name, part, layout, out);
    return;
  }
  requests_->names.emplace_back(name);
  FetchRequest request;
  request.part = part;
  requests_->requests.push_back(request);
  add_target(layout, out);
}

void Batch::add(const Snapshot& snapshot, BlockId block, py::handle out) {
  const auto layout = take(snapshot.layout(block));
  if (bindings::on_device("out", out)) {
    const ManifestEntry entry = snapshot.manifest().find(block)->entry;  // layout() has found it
    add_device(entry.tensor, entry.shard, layout, out);
    return;
  }
  requests_->names.emplace_back();
  FetchRequest request;
  request.block = block;
  requests_->requests.push_back(request);
  add_target(layout, out);
}

void Batch::add_many(const Snapshot& snapshot, py::handle names, py::handle allow_missing) {
  const bool mapping = py::hasattr(names, "items");
  many_ = py::dict();
  Problems problems;
  const py::object items = mapping ? py::object(names.attr("items")()) : py::reinterpret_borrow<py::object>(names);
  std::vector<std::pair<py::str, py::object>> wanted;
  std::vector<Snapshot::Layout> layouts;
  for (const py::handle item : items) {
    const py::object key = mapping ? py::object(item[py::int_(0)]) : py::reinterpret_borrow<py::object>(item);
    const py::object out = mapping ? py::object(item[py::int_(1)]) : py::object(py::none());
    if (!py::isinstance<py::str>(key)) throw py::type_error(cat("tensor names are str, not ", std::string(py::repr(key))));
    const auto name = py::reinterpret_borrow<py::str>(key);
    const auto layout = snapshot.layout(utf8(name), Shard::whole());
    if (!layout.ok()) {
      if (layout.error().code() != Code::kNotFound) raise(layout.error());
      if (!any_match(name, allow_missing)) problems.missing(layout.error());
      continue;
    }
    if (is_ndarray(out)) {
      const Given given{py::reinterpret_borrow<py::array>(out), std::nullopt, std::nullopt};
      if (!fits(given, layout->dtype, layout->shape)) {
        problems.add(misfit(utf8(name), *layout, describe(given.array)));
        continue;
      }
    }
    wanted.emplace_back(name, out);
    layouts.push_back(*layout);
  }
  problems.raise_any();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (bindings::on_device("out", wanted[i].second)) {
      const std::string_view name = utf8(wanted[i].first);
      const DeviceGiven given = add_device(name, Shard::whole(), layouts[i], wanted[i].second);
      if (!fits(given, layouts[i].dtype, layouts[i].shape)) problems.add(misfit(name, layouts[i], describe(given)));
      many_[wanted[i].first] = one_;
      continue;
    }
    requests_->names.emplace_back(utf8(wanted[i].first));
    requests_->requests.emplace_back();
    add_target(layouts[i], wanted[i].second);
    if (last_ != nullptr && !last_->fits(layouts[i].dtype, layouts[i].shape)) {
      const std::string_view name = utf8(wanted[i].first);
      problems.add(last_->is_array() ? misfit(name, layouts[i], last_->describe())
                                     : cat("tensor \"", name, "\" has ", layouts[i].bytes, " bytes, its target ", last_->bytes().size()));
    }
    many_[wanted[i].first] = one_;
  }
  problems.raise_any();
}

std::shared_ptr<Batch::Requests> Batch::requests() {
  if (!on_device()) refuse_stream(stream_);
  // Only now do the names lie where they stay.
  for (std::size_t i = 0; i < requests_->names.size(); ++i) requests_->requests[i].tensor = requests_->names[i];
  return requests_;
}

Status Batch::Requests::fetch(Snapshot& snapshot, const CallOptions& options) {
  if (devices.empty()) return snapshot.fetch(requests, options);
  const Micros begun = steady_clock().now();
  const Micros span = options.timeout.value_or(snapshot.client_options().timeout);
  const auto left = [&] { return CallOptions{span - (steady_clock().now() - begun)}; };
  if (!requests.empty()) PARAMWIRE_CHECK(snapshot.fetch(requests, left()));
  for (const OnDevice& each : devices) PARAMWIRE_CHECK(each.work->fetch(snapshot, each.fetches, left()));
  return {};
}

// ---------------------------------------------------------------- ticket

PyTicket::PyTicket(Ticket ticket, std::unique_ptr<Batch> batch, std::shared_ptr<ClientCore> core)
    : ticket_(std::move(ticket)), batch_(std::move(batch)), core_(std::move(core)) {}

PyTicket::~PyTicket() {
  if (ticket_.done()) return;
  // Its targets are being written to: they go when it is done.
  keep_until([ticket = ticket_, requests = batch_->requests()] { return ticket.done(); }, batch_->keep());
}

py::object PyTicket::wait(py::handle timeout) {
  const auto span = micros(timeout, "timeout");
  const Micros begun = steady_clock().now();
  const Micros until = span && *span < kNever - begun ? begun + *span : kNever;
  for (;;) {
    const Micros left = until == kNever ? kLook : std::min(kLook, until - steady_clock().now());
    const Status status = without_gil([&] { return ticket_.wait(CallOptions{std::max<Micros>(0, left)}); });
    if (ticket_.done()) {
      check(without_gil([this] { return ticket_.wait(CallOptions{0}); }));
      batch_->finish(core_->counters);
      return batch_->result();
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (steady_clock().now() >= until) check(status);
  }
}

// ---------------------------------------------------------------- snapshot

PySnapshot::~PySnapshot() {
  without_gil([this] {
    snapshot_.reset();
    core_.reset();
  });
}

void PySnapshot::close() {
  interruptible([snapshot = snapshot_] {
    snapshot->close();
    return true;
  });
}

const std::vector<TensorEntry>& PySnapshot::entries() const {
  if (!entries_) entries_ = without_gil([this] { return snapshot_->tensors(); });
  return *entries_;
}

py::list PySnapshot::names() const {
  py::list out;
  for (const TensorEntry& entry : entries()) out.append(text(entry.name));
  return out;
}

bool PySnapshot::contains(py::handle name) const {
  return py::isinstance<py::str>(name) && snapshot_->find(utf8(py::reinterpret_borrow<py::str>(name))).ok();
}

py::list PySnapshot::tensors() const {
  py::list out;
  for (const TensorEntry& entry : entries()) out.append(tensor_info(entry));
  return out;
}

py::object PySnapshot::info(const std::string& name) const { return tensor_info(take(snapshot_->find(name))); }

py::list PySnapshot::blocks(const std::string& name) const {
  take(snapshot_->find(name));  // says what is wrong with the name
  const py::object type = python_type("BlockInfo");
  py::list out;
  for (const Manifest::Hit& hit : snapshot_->manifest().tensor_blocks(name)) {
    out.append(type(hit.entry.id.value, hit.entry.shard.to_string(), version_object(hit.entry.version), hit.entry.raw_size, text(codec_name(hit.entry.codec)),
                    hit.entry.stored_size));
  }
  return out;
}

py::object PySnapshot::run(Batch& batch, const CallOptions& options) {
  const auto requests = batch.requests();
  const auto work = [core = core_, snapshot = snapshot_, requests, options] { return requests->fetch(*snapshot, options); };
  const bool direct = batch.bytes() <= kDirectBytes && requests->requests.size() + requests->device_names.size() <= kDirectBlocks;
  check(direct ? answering_signals(work) : interruptible(work, batch.keep()));
  batch.finish(core_->counters);
  return batch.result();
}

py::object PySnapshot::fetch(const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::handle stream) {
  const CallOptions options{micros(timeout, "timeout")};
  const Shard part = shard_from(rows, heads);
  if (!out.is_none() && !on_device("out", out)) {
    refuse_stream(stream);
    // The hot path of small blocks: nothing is made, nothing looked up twice.
    const Target target(out);
    if (!target.scattered() && target.bytes().size() <= kDirectBytes) {
      FetchRequest request;
      request.tensor = utf8(name);
      request.part = part;
      request.target = target.bytes();
      check(answering_signals([&] { return snapshot_->fetch(std::span(&request, 1), options); }));
      return py::reinterpret_borrow<py::object>(out);
    }
  }
  Batch batch(stream, options.timeout);
  batch.add(*snapshot_, utf8(name), part, out);
  return run(batch, options);
}

py::object PySnapshot::fetch_block(std::uint64_t id, py::handle out, py::handle timeout, py::handle stream) {
  const CallOptions options{micros(timeout, "timeout")};
  Batch batch(stream, options.timeout);
  batch.add(*snapshot_, BlockId{id}, out);
  return run(batch, options);
}

py::object PySnapshot::fetch_many(py::handle names, py::handle timeout, py::handle allow_missing, py::handle stream) {
  const CallOptions options{micros(timeout, "timeout")};
  Batch batch(stream, options.timeout);
  batch.add_many(*snapshot_, names, allow_missing);
  return run(batch, options);
}

std::unique_ptr<PyTicket> PySnapshot::fetch_async(py::handle names, py::handle rows, py::handle heads, py::handle out, py::handle timeout,
                                                  py::handle allow_missing) {
  drop_finished();
  const CallOptions options{micros(timeout, "timeout")};
  auto batch = std::make_unique<Batch>(py::none(), options.timeout);
  if (py::isinstance<py::str>(names)) {
    batch->add(*snapshot_, utf8(py::reinterpret_borrow<py::str>(names)), shard_from(rows, heads), out);
  } else {
    if (!rows.is_none() || !heads.is_none() || !out.is_none()) raise_invalid("rows, heads and out belong to one tensor; several take {name: out}");
    batch->add_many(*snapshot_, names, allow_missing);
  }
  const auto requests = batch->requests();
  if (batch->on_device()) raise_invalid("fetch_async fills host memory, and a target is in device memory: fetch it with fetch or fetch_many, in a thread of yours if it shall not wait");
  auto ticket = take(without_gil([&] { return snapshot_->fetch_async(requests->requests, options); }));
  return std::make_unique<PyTicket>(std::move(ticket), std::move(batch), core_);
}

std::unique_ptr<PyView> PySnapshot::view(const std::string& name, py::handle rows, py::handle heads) {
  const Shard part = shard_from(rows, heads);
  const auto layout = take(snapshot_->layout(name, part));
  if (core_->views_ready.load(std::memory_order_relaxed) && layout.bytes <= kDirectViewBytes) {
    auto view = without_gil([&] { return snapshot_->view(name, part); });
    core_->views_ready.store(view.ok(), std::memory_order_relaxed);
    return std::make_unique<PyView>(take(std::move(view)), layout);
  }
  // The first view asks the server for a pin table, and a large one is verified: both may take long.
  const auto held = interruptible([core = core_, snapshot = snapshot_, name, part] {
    return std::make_shared<Result<BlockView>>(snapshot->view(name, part));
  });
  core_->views_ready.store(held->ok(), std::memory_order_relaxed);
  return std::make_unique<PyView>(take(std::move(*held)), layout);
}

void bind_snapshot(py::module_& module) {
  const auto none = py::none();
  py::class_<PyTicket>(module, "Ticket", py::is_final())
      .def_property_readonly("done", &PyTicket::done)
      .def_property_readonly("seconds", &PyTicket::seconds)
      .def("wait", &PyTicket::wait, py::arg("timeout") = none);
  py::class_<PySnapshot>(module, "Snapshot", py::is_final())
      .def_property_readonly("version", &PySnapshot::version)
      .def_property_readonly("leased", &PySnapshot::leased)
      .def_property_readonly("client", &PySnapshot::client)
      .def("__len__", &PySnapshot::size)
      .def("__iter__", [](const PySnapshot& self) { return py::iter(self.names()); })
      .def("__contains__", &PySnapshot::contains, py::arg("name"), py::pos_only())
      .def("__getitem__", [](PySnapshot& self, const py::str& name) { return self.fetch(name, py::none(), py::none(), py::none(), py::none(), py::none()); },
           py::arg("name"), py::pos_only())
      .def("tensors", &PySnapshot::tensors)
      .def("info", &PySnapshot::info, py::arg("name"))
      .def("blocks", &PySnapshot::blocks, py::arg("name"))
      .def("fetch", &PySnapshot::fetch, py::arg("name"), py::kw_only(), py::arg("rows") = none, py::arg("heads") = none, py::arg("out") = none,
           py::arg("timeout") = none, py::arg("stream") = none)
      .def("fetch_block", &PySnapshot::fetch_block, py::arg("id"), py::kw_only(), py::arg("out") = none, py::arg("timeout") = none, py::arg("stream") = none)
      .def("fetch_many", &PySnapshot::fetch_many, py::arg("names"), py::kw_only(), py::arg("timeout") = none, py::arg("allow_missing") = py::tuple(),
           py::arg("stream") = none)
      .def("fetch_async", &PySnapshot::fetch_async, py::arg("names"), py::kw_only(), py::arg("rows") = none, py::arg("heads") = none,
           py::arg("out") = none, py::arg("timeout") = none, py::arg("allow_missing") = py::tuple())
      .def("view", &PySnapshot::view, py::arg("name"), py::kw_only(), py::arg("rows") = none, py::arg("heads") = none)
      .def("close", &PySnapshot::close)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PySnapshot& self, const py::object&, const py::object&, const py::object&) { self.close(); }, py::arg("type"),
           py::arg("value"), py::arg("traceback"));
}

}  // namespace paramwire::bindings
