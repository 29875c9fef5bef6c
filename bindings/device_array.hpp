// Arrays in the memory of a CUDA device, as DLPack (kDLCUDA, kDLCUDAManaged) and __cuda_array_interface__ hand them over, and the order of work on
// them. Sources: the "DLPack" page of the array API standard (`stream`), Numba's manual, "CUDA Array Interface (Version 3)", "Synchronization".
//
// No CUDA is needed to build this, and no driver to import it: a build or a machine without says so when such an array comes.
#pragma once

#include "arrays.hpp"

#include "paramwire/interop/device_arrays.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire::bindings {

// What an object handed over: where its memory is. Never read by the processor.
struct DeviceGiven {
  py::dtype type{"u1"};        // what numpy calls its elements
  std::optional<DType> label;  // as of Given
  std::optional<Shape> shape;  // in elements
  std::vector<py::ssize_t> axes;  // of `type`
  DeviceRange range;
  bool contiguous = true;
  bool read_only = false;
  int ordinal = -1;
  py::object keep;             // keeps the memory
};

// Whether `object` says that it is in the memory of a CUDA device, and has anything there.  errors: InvalidError, as `what`.
bool on_device(std::string_view what, py::handle object);

// What one call does with arrays on devices. GIL held, but for what DeviceWork does.
class DeviceCall {
 public:
  // `stream` of the call: None, an int as the array API standard has it (1: legacy default, 2: per-thread default, a handle; -1: nothing is ordered), or
  // an object of torch, CuPy or one with __cuda_stream__.  errors: InvalidError, TypeError
  DeviceCall(py::handle stream, std::optional<Micros> timeout);

  // What `object` hands over, ordered: work of this call comes after what its library, and `stream`, have under way.
  // errors: InvalidError naming `what`: not C-contiguous, not aligned, another device's, a stream that is captured; UnavailableError: no driver; as
  //         DeviceArrays::begin
  DeviceGiven take(std::string_view what, py::handle object);
  // The same for a target.  errors: InvalidError: read-only
  DeviceGiven take_target(std::string_view what, py::handle object);
  // Where copies for that device are made; take() has made it.
  const std::shared_ptr<DeviceWork>& work(int ordinal) const;
  // Its bytes, in a new array.
  Given read(const DeviceGiven& given, std::optional<Micros> timeout) const;

 private:
  const std::shared_ptr<DeviceWork>& begin(int ordinal);
  DeviceGiven take_cuda_array(std::string_view what, py::handle object);
  DeviceGiven take_dlpack(std::string_view what, py::handle object, std::int32_t type, std::int32_t id);

  std::optional<std::int64_t> stream_;
  std::optional<Micros> timeout_;
  std::vector<std::pair<int, std::shared_ptr<DeviceWork>>> works_;
};

// Raises InvalidError where a stream was given and no array on a device.
void refuse_stream(py::handle stream);

// __cuda_array_interface__ as it stands.  errors: InvalidError naming what is wrong with it; TypeError
struct CudaArray {
  DeviceGiven given;
  std::optional<std::uint64_t> stream;  // that its bytes are there behind; none: they are there
  std::string typestr;
};
CudaArray describe_cuda_array(std::string_view what, py::handle object);

}  // namespace paramwire::bindings
