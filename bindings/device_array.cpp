#include "device_array.hpp"

#include "calls.hpp"
#include "dlpack.hpp"

#include "paramwire/base/text.hpp"

#include <limits>
#include <string>

namespace paramwire::bindings {

namespace {

// Reads up to this size are made by the calling thread, as fetches are.
constexpr std::uint64_t kDirectBytes = std::uint64_t{64} << 20;
// `stream` of the array API standard: the consumer orders nothing.
constexpr std::int64_t kNoOrder = -1;

// Of the process: what devices keep (a context, page-locked halves) serves all clients and servers in it. Never released: the driver may be gone before
// whatever runs at exit.
Result<std::shared_ptr<DeviceArrays>> devices() {
  static std::shared_ptr<DeviceArrays>* opened = nullptr;
  if (opened == nullptr) {
    PARAMWIRE_TRY(made, DeviceArrays::open());
    opened = new std::shared_ptr<DeviceArrays>(std::move(made));
  }
  return *opened;
}

std::shared_ptr<DeviceArrays> need_devices(std::string_view what) {
  auto opened = devices();
  if (!opened.ok()) raise(Error(opened.error().code(), cat(what, " is in the memory of a CUDA device: ", opened.error().message(), ". Or copy it to the host first")));
  return *opened;
}

// The handle that an object of torch, CuPy, or of whoever follows CUDA Python's protocol has; nullopt: it is none of them.
std::optional<std::uint64_t> handle_of(py::handle stream) {
  const auto number = [&](const py::object& value) {
    const auto handle = value_from<std::uint64_t>(value, "stream", "a stream with a handle");
    if (handle > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) raise_invalid(cat("stream has the handle ", handle, ", which is no address"));
    return handle;
  };
  if (py::hasattr(stream, "__cuda_stream__")) {
    py::object pair = stream.attr("__cuda_stream__");
    if (PyCallable_Check(pair.ptr()) != 0) pair = pair();
    if (!py::isinstance<py::tuple>(pair) || py::len(pair) != 2) throw py::type_error(cat("__cuda_stream__ of the stream gave ", std::string(py::repr(pair)), ", expected (version, handle)"));
    return number(pair[py::int_(1)]);
  }
  for (const char* name : {"cuda_stream", "ptr"}) {
    if (py::hasattr(stream, name)) return number(stream.attr(name));
  }
  return std::nullopt;
}

std::optional<std::int64_t> stream_from(py::handle stream) {
  if (stream.is_none()) return std::nullopt;
  if (PyLong_Check(stream.ptr()) != 0 && PyBool_Check(stream.ptr()) == 0) {
    const auto number = value_from<std::int64_t>(stream, "stream", "None, -1, 1, 2 or a stream's handle");
    if (number == 0) raise_invalid("stream is 0, which may mean the legacy default stream (1) or the per-thread one (2): give 1, 2, a stream's handle, or the stream object");
    if (number < kNoOrder) raise_invalid(cat("stream is ", number, ": None, -1 (nothing is ordered), 1, 2 or a stream's handle"));
    return number;
  }
  const auto handle = handle_of(stream);
  if (!handle) throw py::type_error(cat("stream must be None, an int, or a stream of torch, CuPy or anything with __cuda_stream__, not ", type_name(stream)));
  // Of an object there is no doubt: its library's null stream is the legacy default one.
  return static_cast<std::int64_t>(*handle == 0 ? kLegacyStream : *handle);
}

void check_layout(std::string_view what, const DeviceGiven& given) {
  if (given.range.bytes == 0) return;
  if (!given.contiguous) {
    raise_invalid(cat(what, " is ", describe(given), " and not C-contiguous: arrays in device memory must be (tensor.contiguous(), cupy.ascontiguousarray(array)); as out, give a new array and copy that"));
  }
  if (given.range.address == 0) raise_invalid(cat(what, " is ", describe(given), " with a null pointer: give an array that has memory"));
  const auto item = static_cast<std::uint64_t>(given.type.itemsize());
  // Elements of two halves (complex) are as aligned as one.
  const std::uint64_t alignment = given.type.kind() == 'c' ? item / 2 : item;
  if (alignment != 0 && given.range.address % alignment != 0) {
    raise_invalid(cat(what, " is ", describe(given), " at 0x", hex64(given.range.address), ", which is not aligned to its elements of ", item, " bytes: copy it (tensor.clone(), array.copy())"));
  }
}

}  // namespace

bool on_device(std::string_view what, py::handle object) {
  if (is_ndarray(object) || PyCapsule_CheckExact(object.ptr()) != 0) return false;
  if (py::hasattr(object, "__dlpack__")) {
    const auto device = dlpack::device_of(what, object);
    return device && dlpack::on_cuda(*device);
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0 || py::hasattr(object, "__array_interface__") || !py::hasattr(object, "__cuda_array_interface__")) return false;
  return describe_cuda_array(what, object).given.range.bytes > 0;
}

void refuse_stream(py::handle stream) {
  if (!stream.is_none()) raise_invalid("stream belongs to arrays in the memory of a CUDA device, and there is none in this call: leave it out");
}

DeviceCall::DeviceCall(py::handle stream, std::optional<Micros> timeout) : stream_(stream_from(stream)), timeout_(timeout) {}

const std::shared_ptr<DeviceWork>& DeviceCall::work(int ordinal) const {
  for (const auto& [device, work] : works_) {
    if (device == ordinal) return work;
  }
  raise(Error(Code::kInternal, cat("no work on cuda:", ordinal)));
}

const std::shared_ptr<DeviceWork>& DeviceCall::begin(int ordinal) {
  for (const auto& [device, work] : works_) {
    if (device == ordinal) return work;
  }
  const auto opened = need_devices("the array");
  std::shared_ptr<DeviceWork> made = bindings::take(answering_signals([&] { return opened->begin(ordinal, {.timeout = timeout_}); }));
  // The stream is looked at before a producer enqueues anything in it.
  if (stream_ && *stream_ != kNoOrder) check(without_gil([&] { return made->after(static_cast<std::uint64_t>(*stream_)); }));
  return works_.emplace_back(ordinal, std::move(made)).second;
}

DeviceGiven DeviceCall::take(std::string_view what, py::handle object) {
  static_cast<void>(need_devices(what));
  const auto device = py::hasattr(object, "__dlpack__") ? dlpack::device_of(what, object) : std::nullopt;
  DeviceGiven out = device ? take_dlpack(what, object, device->type, device->id) : take_cuda_array(what, object);
  check_layout(what, out);
  check(without_gil([&] { return work(out.ordinal)->check(out.range, what); }));
  return out;
}

DeviceGiven DeviceCall::take_target(std::string_view what, py::handle object) {
  DeviceGiven out = take(what, object);
  if (out.read_only) raise_invalid(cat(what, " must be writable, and is read-only"));
  return out;
}

DeviceGiven DeviceCall::take_dlpack(std::string_view what, py::handle object, std::int32_t type, std::int32_t id) {
  const std::shared_ptr<DeviceWork> work = begin(id);
  // The producer makes that stream wait for its own work; what we do comes after it.
  const std::int64_t stream = stream_.value_or(static_cast<std::int64_t>(work->stream()));
  DeviceGiven out = dlpack::take_device(what, object, {type, id}, stream);
  if (stream_ && stream > 0) check(without_gil([&] { return work->after(static_cast<std::uint64_t>(stream)); }));
  out.ordinal = id;
  return out;
}

DeviceGiven DeviceCall::take_cuda_array(std::string_view what, py::handle object) {
  CudaArray array = describe_cuda_array(what, object);
  array.given.ordinal = bindings::take(need_devices(what)->device_of(array.given.range.address, what));
  const std::shared_ptr<DeviceWork> work = begin(array.given.ordinal);
  const bool ordered = stream_ != kNoOrder;
  if (ordered && array.stream) check(without_gil([&] { return work->after(*array.stream); }));
  return std::move(array.given);
}

Given DeviceCall::read(const DeviceGiven& given, std::optional<Micros> timeout) const {
  py::array array(given.type, given.axes);
  const std::span<std::byte> bytes = bytes_of(array);
  const auto work = [device = this->work(given.ordinal), range = given.range, bytes, timeout] { return device->read(range, bytes, {.timeout = timeout}); };
  check(given.range.bytes <= kDirectBytes ? answering_signals(work) : interruptible(work, py::make_tuple(array, given.keep)));
  return {array, given.label, given.shape};
}

}  // namespace paramwire::bindings
