#include "calls.hpp"
#include "module.hpp"
#include "publish.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

namespace paramwire::bindings {

namespace {

// Small arrays of put_all go to the core together, so that a model of many tiny tensors does not pay for the hand-over of each.
// Bounds the copies of arrays that were not C-contiguous, too.
constexpr std::uint64_t kBatchBytes = std::uint64_t{4} << 20;
constexpr std::size_t kBatchItems = 1024;

std::string quoted(const std::string& name) { return cat("tensor \"", name, '"'); }

}  // namespace

namespace {
// "bf16+planes"; None: none.
std::optional<CodecSpec> codec_from(py::handle codec) {
  if (codec.is_none()) return std::nullopt;
  return take(parse_codec(value_from<std::string>(codec, "codec", "a str, as \"bf16+planes\", or None")));
}
}  // namespace

PublishOptions publish_options(py::handle base, py::handle codec, py::handle threads, py::handle timeout) {
  PublishOptions options;
  options.codec = codec_from(codec).value_or(CodecSpec{});
  if (!threads.is_none()) {
    options.encode_threads = value_from<unsigned>(threads, "encode_threads", "a number of threads, 1 to 2**32 - 1, or None");
    if (*options.encode_threads == 0) raise_invalid("encode_threads is 0: the caller's thread is one of them");
  }
  options.timeout = micros(timeout, "timeout");
  options.any_base = base.ptr() == Py_Ellipsis;
  if (!options.any_base && !base.is_none()) options.base = version_from(base);
  return options;
}

PyPublish::PyPublish(std::unique_ptr<Publisher> publisher, bool waits, std::optional<Micros> timeout, std::shared_ptr<Counters> counters, py::object owner)
    : shared_(std::make_shared<Shared>()), waits_(waits), options_{timeout}, counters_(std::move(counters)), owner_(std::move(owner)),
      version_(publisher->version()) {
  shared_->publisher = std::move(publisher);
}

PyPublish::~PyPublish() {
  without_gil([this] { shared_.reset(); });
}

template <typename Work>
auto PyPublish::call(Work work, py::object keep) {
  const auto locked = [shared = shared_, work = std::move(work)] {
    const std::lock_guard lock(shared->mutex);
    return work(*shared->publisher);
  };
  if (waits_) return interruptible(locked, std::move(keep));
  return without_gil(locked);
}

Given PyPublish::given(const std::string& name, py::handle array, py::handle stream) {
  if (!on_device(quoted(name), array)) {
    refuse_stream(stream);
    return given_from(quoted(name), array);
  }
  DeviceCall call(stream, options_.timeout);
  return call.read(call.take(quoted(name), array), options_.timeout);
}

Source PyPublish::source(const std::string& name, Given given, py::handle dtype, py::handle shape, py::handle rows, py::handle heads) {
  const std::uint64_t before = counters_->copies;
  Source out = source_from(name, std::move(given), dtype, shape, rows, heads, counters_->copies);
  copies_ += counters_->copies - before;
  return out;
}

void PyPublish::send(std::vector<Item> items) {
  py::list arrays;
  struct Put {
    std::string name;
    DType dtype;
    Shape shape;
    Shard part;
    std::span<const std::byte> bytes;
    std::optional<CodecSpec> codec;
  };
  std::vector<Put> puts;
  for (Item& item : items) {
    arrays.append(item.source.array);
    puts.push_back({std::move(item.name), item.source.dtype, item.source.shape, item.source.part, item.source.bytes, item.codec});
  }
  check(call(
      [puts = std::move(puts), options = options_](Publisher& publisher) -> Status {
        for (const Put& put : puts) {
          PARAMWIRE_CHECK(publisher.put(put.name, put.dtype, put.shape, put.part, put.bytes, put.codec.value_or(publisher.codec()), options));
        }
        return {};
      },
      arrays));
}

void PyPublish::put(const std::string& name, py::handle array, py::handle dtype, py::handle shape, py::handle rows, py::handle heads, py::handle codec,
                    py::handle stream) {
  std::vector<Item> items;
  items.push_back({name, source(name, given(name, array, stream), dtype, shape, rows, heads), codec_from(codec)});
  send(std::move(items));
}

void PyPublish::put_rows(const std::string& name, py::handle array, std::uint64_t block_bytes, py::handle dtype, py::handle shape, py::handle codec,
                         py::handle stream) {
  const auto spec = codec_from(codec);
  if (block_bytes == 0) raise_invalid("block_bytes is 0");
  const Source whole = source(name, given(name, array, stream), dtype, shape, py::none(), py::none());
  // What the tensor was cut into before would overlap.
  const Status removed = call([name, options = options_](Publisher& publisher) { return publisher.remove(name, options); });
  if (!removed.ok() && removed.error().code() != Code::kNotFound) raise(removed.error());
  const std::uint64_t rows = whole.shape.rank() == 0 ? 1 : whole.shape[0];
  const std::uint64_t row_bits = rows == 0 ? 0 : whole.shape.elements() / rows * dtype_bits(whole.dtype);
  std::vector<Item> items;
  if (whole.bytes.size() <= block_bytes || rows < 2) {
    items.push_back({name, whole, spec});
    return send(std::move(items));
  }
  std::uint64_t step = std::max<std::uint64_t>(1, block_bytes * 8 / row_bits);
  if (row_bits % 8 != 0) step = std::max<std::uint64_t>(2, step / 2 * 2);  // 4-bit rows of odd length: two fill whole bytes
  for (std::uint64_t begin = 0; begin < rows; begin += step) {
    const std::uint64_t end = std::min(rows, begin + step);
    Source part = whole;
    part.part = Shard::rows(begin, end);
    part.bytes = whole.bytes.subspan(static_cast<std::size_t>(begin * row_bits / 8), static_cast<std::size_t>(((end - begin) * row_bits + 7) / 8));
    items.push_back({name, std::move(part), spec});
  }
  send(std::move(items));
}

namespace {

// Memory that two names share: same start, type, shape and strides. Empty arrays share nothing, whatever their pointer says.
using Key = std::tuple<std::uint64_t, std::string, std::vector<py::ssize_t>, std::vector<py::ssize_t>>;

// The label where the protocol gave one: numpy may show two types alike.
std::string type_of(const std::optional<DType>& label, const py::dtype& type) { return label ? std::string(dtype_name(*label)) : std::string(py::str(py::object(type))); }

Key key_of(const Given& given) {
  const py::array& array = given.array;
  return {reinterpret_cast<std::uintptr_t>(array.data()), type_of(given.label, array.dtype()), {array.shape(), array.shape() + array.ndim()}, {array.strides(), array.strides() + array.ndim()}};
}
// Addresses of a process are one space; contiguous.
Key key_of(const DeviceGiven& given) { return {given.range.address, type_of(given.label, given.type), given.axes, {}}; }

}  // namespace

void PyPublish::put_all(py::handle mapping, py::handle codec, py::handle stream) {
  const auto spec = codec_from(codec);
  DeviceCall call(stream, options_.timeout);
  bool devices = false;
  std::map<Key, std::string> seen;
  std::vector<std::pair<std::string, std::string>> ties;
  std::vector<Item> batch;
  std::uint64_t bytes = 0;
  const auto flush = [&] {
    if (!batch.empty()) send(std::exchange(batch, {}));
    bytes = 0;
  };
  py::list kept;  // an array that was made on the way must not lend its address to the next one
  for (const py::handle item : items_of(mapping, "arrays")) {
    const auto pair = py::reinterpret_borrow<py::tuple>(item);
    const std::string name = name_from(pair[0]);
    const bool device = on_device(quoted(name), pair[1]);
    devices = devices || device;
    // Only what is no tie leaves its device.
    std::optional<DeviceGiven> there;
    Given given;
    if (device) there = call.take(quoted(name), pair[1]);
    else given = given_from(quoted(name), pair[1]);
    if (device ? there->range.bytes > 0 : given.array.nbytes() > 0) {
      kept.append(device ? there->keep : given.array);
      const auto [at, fresh] = seen.emplace(device ? key_of(*there) : key_of(given), name);
      if (!fresh) {
        ties.emplace_back(name, at->second);
        continue;
      }
    }
    if (device) given = call.read(*there, options_.timeout);
    batch.push_back({name, source(name, std::move(given), py::none(), py::none(), py::none(), py::none()), spec});
    bytes += batch.back().source.bytes.size();
    if (bytes >= kBatchBytes || batch.size() >= kBatchItems) flush();
  }
  if (!devices) refuse_stream(stream);
  flush();
  for (const auto& [name, target] : ties) alias(name, target);
}

void PyPublish::alias(const std::string& name, const std::string& target) {
  check(call([name, target, options = options_](Publisher& publisher) { return publisher.alias(name, target, options); }));
}

void PyPublish::remove(const std::string& name) {
  check(call([name, options = options_](Publisher& publisher) { return publisher.remove(name, options); }));
}

Publisher::Totals PyPublish::totals() {
  return without_gil([this] {
    const std::lock_guard lock(shared_->mutex);
    return shared_->publisher->totals();
  });
}

py::object PyPublish::finish(py::handle timeout) {
  CallOptions options = options_;
  if (!timeout.is_none()) options.timeout = micros(timeout, "timeout");
  const auto version = take(call([options](Publisher& publisher) { return publisher.finish(options); }));
  over_ = true;
  return version_object(version);
}

void PyPublish::abort() {
  over_ = true;
  // Never waits behind a call that was interrupted: then the abort follows it.
  const bool done = without_gil([this] {
    const std::unique_lock lock(shared_->mutex, std::try_to_lock);
    if (lock) shared_->publisher->abort();
    return lock.owns_lock();
  });
  if (done) return;
  start_job([shared = shared_] {
    const std::lock_guard lock(shared->mutex);
    shared->publisher->abort();
  });
}

void PyPublish::leave(bool failed) {
  if (over_) return;
  if (failed) return abort();
  finish(py::none());
}

void bind_publish(py::module_& module) {
  py::class_<PyPublish>(module, "Publish", py::is_final())
      .def("put", &PyPublish::put, py::arg("name"), py::arg("array"), py::kw_only(), py::arg("dtype") = py::none(), py::arg("shape") = py::none(),
           py::arg("rows") = py::none(), py::arg("heads") = py::none(), py::arg("codec") = py::none(), py::arg("stream") = py::none())
      .def("put_rows", &PyPublish::put_rows, py::arg("name"), py::arg("array"), py::arg("block_bytes") = std::uint64_t{4} << 20, py::kw_only(),
           py::arg("dtype") = py::none(), py::arg("shape") = py::none(), py::arg("codec") = py::none(), py::arg("stream") = py::none())
      .def("put_all", &PyPublish::put_all, py::arg("arrays"), py::kw_only(), py::arg("codec") = py::none(), py::arg("stream") = py::none())
      .def("put_checkpoint", &PyPublish::put_checkpoint, py::arg("checkpoint"), py::kw_only(), py::arg("replaces") = py::none(), py::arg("workers") = 2U,
           py::arg("memory_limit") = py::none(), py::arg("progress") = py::none())
      .def("alias", &PyPublish::alias, py::arg("name"), py::arg("target"))
      .def("remove", &PyPublish::remove, py::arg("name"))
      .def("finish", &PyPublish::finish, py::arg("timeout") = py::none())
      .def("abort", &PyPublish::abort)
      .def_property_readonly("version", &PyPublish::version)
      .def_property_readonly("copies", &PyPublish::copies)
      .def_property_readonly("given_bytes", [](PyPublish& self) { return self.totals().given_bytes; })
      .def_property_readonly("stored_bytes", [](PyPublish& self) { return self.totals().stored_bytes; })
      .def_property_readonly("overflowed", [](PyPublish& self) { return self.totals().overflowed; })
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyPublish& self, const py::object& type, const py::object&, const py::object&) { self.leave(!type.is_none()); },
           py::arg("type"), py::arg("value"), py::arg("traceback"));
}

}  // namespace paramwire::bindings
