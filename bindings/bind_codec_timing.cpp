// Codecs timed without the interpreter, and without the memory of one round being new in the next: for `paramwire bench codec` and
// `paramwire codec advise`.
#include "arrays.hpp"
#include "calls.hpp"
#include "module.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/codec/block.hpp"
#include "paramwire/codec/cast.hpp"
#include "paramwire/codec/plane_kernels.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::bindings {

namespace {

// Seconds of each round, by what was measured.
using Times = std::map<std::string, std::vector<double>>;

template <typename Work>
void timed(std::vector<double>& times, const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

Source source_of(py::handle array, py::handle dtype) {
  std::atomic<std::uint64_t> copies{0};
  return source_from("array", given_from("array", array), dtype, py::none(), py::none(), py::none(), copies);
}

// What a decoder has to give back, without the codec: the cast alone.
Result<std::vector<std::byte>> wanted(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw) {
  if (spec.encoded_dtype(dtype) == dtype) return std::vector<std::byte>(raw.begin(), raw.end());
  std::vector<std::byte> out(raw.size() / 2);
  PARAMWIRE_CHECK(cast_elements(dtype, raw, *spec.cast, out));
  return out;
}

struct CodecTimes {
  Times times;
  std::uint64_t raw_size = 0, stored_size = 0;
  CodecId codec = CodecId::kRaw;
  bool correct = true;
};

Result<CodecTimes> measure_codec(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads, unsigned rounds) {
  CodecTimes out;
  PARAMWIRE_TRY(expected, wanted(spec, dtype, raw));
  EncodedBlock block;
  std::vector<std::byte> back(expected.size()), copy(raw.size());
  Status status;
  // The first round finds its memory new, and is not counted.
  for (unsigned round = 0; round <= rounds && status.ok(); ++round) {
    std::vector<double> encode, decode, copies;
    timed(encode, [&] { status = encode_block(spec, dtype, raw, threads, block); });
    if (!status.ok()) break;
    std::fill(back.begin(), back.end(), std::byte{0xee});
    timed(decode, [&] { status = decode_block(block.codec, block.dtype, block.bytes, block.extents, 0, back, threads); });
    timed(copies, [&] { std::memcpy(copy.data(), raw.data(), raw.size()); });
    out.correct = out.correct && back == expected;
    if (round == 0) continue;
    out.times["encode"].push_back(encode[0]);
    out.times["decode"].push_back(decode[0]);
    out.times["memcpy"].push_back(copies[0]);
  }
  if (!status.ok()) return std::move(status).error();
  out.raw_size = block.raw_size;
  out.stored_size = block.bytes.size();
  out.codec = block.codec;
  return out;
}

py::dict time_codec(py::handle array, const std::string& codec, py::handle dtype, unsigned threads, unsigned rounds) {
  const CodecSpec spec = take(parse_codec(codec));
  const Source source = source_of(array, dtype);
  auto measured = take(interruptible([spec, dtype = source.dtype, bytes = source.bytes, threads, rounds] { return measure_codec(spec, dtype, bytes, threads, rounds); },
                                     source.array));
  return py::dict(py::arg("encode_s") = measured.times["encode"], py::arg("decode_s") = measured.times["decode"], py::arg("memcpy_s") = measured.times["memcpy"],
                  py::arg("raw_bytes") = measured.raw_size, py::arg("stored_bytes") = measured.stored_size, py::arg("codec") = text(codec_name(measured.codec)),
                  py::arg("correct") = measured.correct);
}

// The cast, the split and the CRC: each over all of the tensor by itself, and all three extent by extent as the encoder runs them.
Result<Times> measure_fused(DType to, std::span<const std::byte> raw, unsigned rounds) {
  Times times;
  const std::size_t count = raw.size() / 4;
  std::vector<std::byte> cast(count * 2), alone(count * 2), copy(raw.size());
  std::vector<std::uint8_t> planes(count * 2), few(kExtentBytes);
  std::uint32_t sum = 0;
  Status status;
  const auto to_planes = [](std::span<const std::byte> from, std::uint8_t* target) {
    planes::split(reinterpret_cast<const std::uint8_t*>(from.data()), from.size() / 2, 2, true, target, from.size() / 2);
  };
  const auto keep = [&status](const Result<std::uint64_t>& result) {
    if (!result.ok()) status = result.error();
  };
  constexpr std::size_t kStep = kExtentBytes;
  for (unsigned round = 0; round <= rounds; ++round) {
    std::map<std::string, std::vector<double>> now;
    timed(now["memcpy"], [&] { std::memcpy(copy.data(), raw.data(), raw.size()); });
    timed(now["cast"], [&] { keep(cast_elements(DType::kF32, raw, to, cast)); });
    timed(now["split"], [&] {
      for (std::size_t at = 0; at < cast.size(); at += kStep) to_planes(std::span(cast).subspan(at, std::min(kStep, cast.size() - at)), planes.data() + at);
    });
    timed(now["crc"], [&] { sum += crc32c(cast); });
    timed(now["widen"], [&] { keep(cast_elements(to, cast, DType::kF32, copy)); });
    timed(now["fused"], [&] {
      for (std::size_t at = 0; at < cast.size(); at += kStep) {
        const std::size_t size = std::min(kStep, cast.size() - at);
        const auto extent = std::span(alone).first(size);
        keep(cast_elements(DType::kF32, raw.subspan(2 * at, 2 * size), to, extent));
        to_planes(extent, few.data());  // from where the encoder codes them
        sum += crc32c(extent);
      }
    });
    if (!status.ok()) return std::move(status).error();
    if (round == 0) continue;
    for (const auto& [name, value] : now) times[name].push_back(value[0]);
  }
  times["crc_sum"] = {static_cast<double>(sum)};  // used, so that no CRC is left out
  return times;
}

py::dict time_casts(py::handle array, const std::string& to, unsigned rounds) {
  const DType dtype = take(dtype_from_name(to));
  const Source source = source_of(array, py::none());
  if (source.dtype != DType::kF32) raise_invalid(cat("time_casts: an array of f32 is needed, this is ", dtype_name(source.dtype)));
  const Times times = take(interruptible([dtype, bytes = source.bytes, rounds] { return measure_fused(dtype, bytes, rounds); }, source.array));
  py::dict out;
  for (const auto& [name, values] : times) {
    if (name != "crc_sum") out[text(name + "_s")] = values;
  }
  return out;
}

}  // namespace

void bind_codec_timing(py::module_& module) {
  module.def("time_codec", &time_codec, py::arg("array"), py::arg("codec"), py::pos_only(), py::kw_only(), py::arg("dtype") = py::none(), py::arg("threads") = 1,
             py::arg("rounds") = 5);
  module.def("time_casts", &time_casts, py::arg("array"), py::arg("to"), py::pos_only(), py::kw_only(), py::arg("rounds") = 5);
}

}  // namespace paramwire::bindings
