#include "arrays.hpp"
#include "bytes_view.hpp"
#include "convert.hpp"
#include "gil.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta.hpp"
#include "paramwire/codec/onebit.hpp"

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paramwire::bindings {

namespace {

// An array as a block's raw bytes, row-major and little-endian.
struct Block {
  py::array array;  // keeps the bytes
  DType dtype = DType::kU8;
  std::span<const std::byte> bytes;
};

Block block_from(std::string_view what, py::handle object, py::handle dtype) {
  Given given = given_from(what, object);
  Block out{std::move(given.array), DType::kU8, {}};
  given.array = out.array;
  out.dtype = choose_label(what, given, dtype);
  if (out.array.dtype().byteorder() == '>') raise_invalid(cat(what, " is big-endian: blocks are little-endian"));
  if ((out.array.flags() & py::array::c_style) == 0) out.array = out.array.attr("copy")("C");
  out.bytes = {static_cast<const std::byte*>(out.array.data()), static_cast<std::size_t>(out.array.nbytes())};
  return out;
}

py::bytes bytes_object(const std::vector<std::byte>& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::optional<Version> held_version(py::handle version) {
  if (version.is_none()) return std::nullopt;
  return version_from(version);
}

// Where a result goes: `out`, or a new array like `base`.
class ResultArray {
 public:
  ResultArray(const Block& base, py::handle out) {
    if (out.is_none()) {
      array_ = py::array(base.array.dtype(), std::vector<py::ssize_t>(base.array.shape(), base.array.shape() + base.array.ndim()));
      bytes_ = bytes_of(*array_);
      return;
    }
    target_.emplace(out);
    if (target_->scattered()) raise_invalid(cat("out is ", target_->describe(), ", not C-contiguous: give a contiguous one and copy it"));
    bytes_ = target_->bytes();
    out_ = py::reinterpret_borrow<py::object>(out);
  }
  std::span<std::byte> bytes() const noexcept { return bytes_; }
  py::object object() const { return array_ ? py::object(*array_) : out_; }

 private:
  std::optional<py::array> array_;
  std::optional<Target> target_;
  py::object out_;
  std::span<std::byte> bytes_;
};

std::optional<DeltaForm> form_from(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  for (const DeltaForm form : {DeltaForm::kFull, DeltaForm::kXor, DeltaForm::kSteps, DeltaForm::kSparse}) {
    if (delta_form_name(form) == *name) return form;
  }
  raise_invalid(cat("form is \"", *name, "\"; \"full\", \"xor\", \"steps\" and \"sparse\" are forms"));
}

OnebitScale scale_from(const std::string& name) {
  if (name == "matrix") return OnebitScale::kMatrix;
  if (name == "row") return OnebitScale::kRow;
  raise_invalid(cat("scale is \"", name, "\"; \"matrix\" and \"row\" can be"));
}

py::bytes encode_delta_of(py::handle base, py::handle next, py::handle version, py::handle dtype, const std::optional<std::string>& form, unsigned classes,
                          unsigned threads) {
  const Block from = block_from("base", base, dtype), to = block_from("next", next, dtype);
  if (from.dtype != to.dtype) raise_invalid(cat("base is ", dtype_name(from.dtype), ", next is ", dtype_name(to.dtype), ": publish it in full"));
  if (shape_from(from.array.attr("shape")) != shape_from(to.array.attr("shape"))) {
    raise_invalid(cat("base is ", describe(from.array), ", next is ", describe(to.array), ": a delta says nothing of shapes, so both must have one; publish it in full"));
  }
  const DeltaBase base_is{version_from(version)};
  const DeltaTuning tuning{form_from(form), classes};
  return bytes_object(take(without_gil([&] { return encode_delta(from.dtype, from.bytes, base_is, to.bytes, threads, tuning); })));
}

py::object delta_info_of(const py::object& delta) {
  const BytesView view(delta);
  const DeltaInfo info = take(without_gil([&] { return read_delta(view.bytes()); }));
  return python_type("DeltaInfo")(text(delta_form_name(info.form)), text(dtype_name(info.dtype)), info.raw_size, info.delta_size,
                                  version_object(info.base_version), info.base_crc64, info.result_crc64);
}

py::tuple apply_delta_to(const py::object& delta, py::handle base, py::handle out, py::handle version, py::handle dtype, unsigned threads) {
  const BytesView view(delta);
  const Block from = block_from("base", base, dtype);
  const ResultArray result(from, out);
  const auto held = held_version(version);
  const DeltaApplied done = take(without_gil([&] { return apply_delta(view.bytes(), from.dtype, from.bytes, held, result.bytes(), threads); }));
  return py::make_tuple(result.object(), done.applied);
}

py::bytes encode_onebit_of(py::handle base, py::handle tuned, py::handle version, py::handle dtype, const std::string& scale) {
  const Block from = block_from("base", base, dtype), to = block_from("tuned", tuned, dtype);
  if (from.dtype != to.dtype) raise_invalid(cat("base is ", dtype_name(from.dtype), ", tuned is ", dtype_name(to.dtype), ": cast one of them"));
  const Shape shape = shape_from(from.array.attr("shape"));
  if (shape != shape_from(to.array.attr("shape"))) raise_invalid(cat("base is ", describe(from.array), ", tuned is ", describe(to.array)));
  const Version base_version = version_from(version);
  const OnebitScale kind = scale_from(scale);
  return bytes_object(take(without_gil([&] { return encode_onebit(from.dtype, shape, from.bytes, base_version, to.bytes, kind); })));
}

py::object onebit_info_of(const py::object& delta) {
  const BytesView view(delta);
  const OnebitInfo info = take(without_gil([&] { return read_onebit(view.bytes()); }));
  return python_type("OnebitInfo")(text(dtype_name(info.dtype)), text(info.scale == OnebitScale::kRow ? "row" : "matrix"), info.rows, info.columns,
                                   info.delta_size, version_object(info.base_version), info.base_crc64, info.kLossy);
}

py::object apply_onebit_to(const py::object& delta, py::handle base, py::handle out, py::handle version, py::handle dtype, unsigned threads) {
  const BytesView view(delta);
  const Block from = block_from("base", base, dtype);
  const ResultArray result(from, out);
  const auto held = held_version(version);
  check(without_gil([&] { return apply_onebit(view.bytes(), from.dtype, from.bytes, held, result.bytes(), threads); }));
  return result.object();
}

}  // namespace

void bind_delta(py::module_& module) {
  module.def("encode_delta", &encode_delta_of, py::arg("base"), py::arg("next"), py::kw_only(), py::arg("version"), py::arg("dtype") = py::none(),
             py::arg("form") = py::none(), py::arg("classes") = 16U, py::arg("threads") = 1U);
  module.def("delta_info", &delta_info_of, py::arg("delta"));
  module.def("apply_delta", &apply_delta_to, py::arg("delta"), py::arg("base"), py::kw_only(), py::arg("out") = py::none(), py::arg("version") = py::none(),
             py::arg("dtype") = py::none(), py::arg("threads") = 1U);
  module.def("encode_onebit", &encode_onebit_of, py::arg("base"), py::arg("tuned"), py::kw_only(), py::arg("version"), py::arg("dtype") = py::none(),
             py::arg("scale") = "row");
  module.def("onebit_info", &onebit_info_of, py::arg("delta"));
  module.def("apply_onebit", &apply_onebit_to, py::arg("delta"), py::arg("base"), py::kw_only(), py::arg("out") = py::none(), py::arg("version") = py::none(),
             py::arg("dtype") = py::none(), py::arg("threads") = 1U);
}

}  // namespace paramwire::bindings
