#include "arrays.hpp"
#include "calls.hpp"
#include "codec.hpp"
#include "module.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/codec/cast.hpp"

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace paramwire::bindings {

namespace {

CodecSpec spec_from(const std::string& codec) { return take(parse_codec(codec)); }

// A tensor of another label than the array's own type: bf16 as uint16, where ml_dtypes isn't there.
Source array_source(py::handle array, py::handle dtype) {
  std::atomic<std::uint64_t> copies{0};
  return source_from("array", given_from("array", array), dtype, py::none(), py::none(), py::none(), copies);
}

std::shared_ptr<PyEncoded> encode(py::handle array, const std::string& codec, py::handle dtype, unsigned threads) {
  const CodecSpec spec = spec_from(codec);
  const Source source = array_source(array, dtype);
  auto out = std::make_shared<PyEncoded>();
  out->shape = source.shape;
  // The array is kept until the work is done, interrupted or not.
  check(interruptible([spec, label = source.dtype, bytes = source.bytes, threads, out] { return encode_block(spec, label, bytes, threads, out->block); }, source.array));
  return out;
}

std::shared_ptr<PyEncoded> from_parts(py::handle data, py::handle chunks, const std::string& codec, const std::string& dtype, py::handle shape) {
  auto out = std::make_shared<PyEncoded>();
  out->block.codec = take(codec_of(codec));
  out->block.dtype = take(dtype_from_name(dtype));
  out->shape = shape_from(shape);
  out->block.raw_size = tensor_bytes(out->block.dtype, out->shape);
  const Source bytes = array_source(data, py::str("u8"));
  const Source rows = array_source(chunks, py::str("u32"));
  if (rows.bytes.size() != chunk_count(out->block.raw_size) * sizeof(EncodedChunk)) {
    raise_invalid(cat("chunks: ", rows.bytes.size() / sizeof(EncodedChunk), " rows of (stored bytes, CRC-32C); ", dtype, " of shape ", out->shape, " has ",
                      chunk_count(out->block.raw_size)));
  }
  out->block.bytes.assign(bytes.bytes.begin(), bytes.bytes.end());
  out->block.chunks.resize(rows.bytes.size() / sizeof(EncodedChunk));
  if (!rows.bytes.empty()) std::memcpy(out->block.chunks.data(), rows.bytes.data(), rows.bytes.size());
  out->block.crc64 = crc64(out->block.bytes);
  return out;
}

py::array decode(const std::shared_ptr<PyEncoded>& encoded, unsigned threads) {
  py::array out = new_array(encoded->block.dtype, encoded->shape);
  const auto raw = bytes_of(out);
  check(interruptible(
      [encoded, raw, threads] { return decode_block(encoded->block.codec, encoded->block.dtype, encoded->block.bytes, encoded->block.chunks, 0, raw, threads); }, out));
  return out;
}

py::tuple cast(py::handle array, const std::string& to, py::handle dtype, bool saturate) {
  const Source source = array_source(array, dtype);
  const DType target_dtype = take(dtype_from_name(to));
  py::array out = new_array(target_dtype, source.shape);
  const auto target = bytes_of(out);
  const auto overflowed = interruptible(
      [from = source.dtype, bytes = source.bytes, target_dtype, target, saturate] {
        return cast_elements(from, bytes, target_dtype, target, saturate ? Overflow::kSaturate : Overflow::kInfinity);
      },
      py::make_tuple(source.array, out));
  const std::uint64_t count = take(overflowed);
  return py::make_tuple(out, count);
}

// (n, 2) uint32: stored bytes and CRC-32C of each chunk, over the block's own rows.
py::array chunks_of(const py::object& self) {
  const auto& rows = self.cast<const PyEncoded&>().block.chunks;
  return array_over(DType::kU32, Shape{rows.size(), 2}, reinterpret_cast<const std::byte*>(rows.data()), self);
}

py::array data_of(const py::object& self) {
  const auto& bytes = self.cast<const PyEncoded&>().block.bytes;
  return array_over(DType::kU8, Shape{bytes.size()}, bytes.data(), self);
}

}  // namespace

void bind_codec(py::module_& module) {
  py::class_<PyEncoded, std::shared_ptr<PyEncoded>>(module, "Encoded")
      .def(py::init(&from_parts), py::arg("data"), py::arg("chunks"), py::kw_only(), py::arg("codec"), py::arg("dtype"), py::arg("shape"))
      .def_property_readonly("codec", [](const PyEncoded& self) { return text(codec_name(self.block.codec)); })
      .def_property_readonly("dtype", [](const PyEncoded& self) { return text(dtype_name(self.block.dtype)); })
      .def_property_readonly("shape", [](const PyEncoded& self) { return shape_tuple(self.shape); })
      .def_property_readonly("data", &data_of)
      .def_property_readonly("chunks", &chunks_of)
      .def_property_readonly("nbytes", [](const PyEncoded& self) { return self.block.bytes.size(); })
      .def_property_readonly("raw_nbytes", [](const PyEncoded& self) { return self.block.raw_size; })
      .def_property_readonly("ratio",
                             [](const PyEncoded& self) {
                               return self.block.raw_size == 0 ? 1.0 : static_cast<double>(self.block.bytes.size()) / static_cast<double>(self.block.raw_size);
                             })
      .def_property_readonly("crc64", [](const PyEncoded& self) { return self.block.crc64; })
      .def_property_readonly("overflowed", [](const PyEncoded& self) { return self.block.overflowed; });
  module.def("encode", &encode, py::arg("array"), py::arg("codec"), py::pos_only(), py::kw_only(), py::arg("dtype") = py::none(), py::arg("threads") = 1);
  module.def("decode", &decode, py::arg("encoded"), py::pos_only(), py::kw_only(), py::arg("threads") = 1);
  module.def("cast", &cast, py::arg("array"), py::arg("to"), py::pos_only(), py::kw_only(), py::arg("dtype") = py::none(), py::arg("saturate") = false);
  module.def("cast_implementation", [] { return std::string(cast_implementation()); });
}

}  // namespace paramwire::bindings
