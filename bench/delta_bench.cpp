// Speed and size of lossless deltas beside glibc's memcpy in the same run: one JSON object a line, to stdout.
//
//   delta_bench [--mib N] [--rounds N] [--case NAME]
//
// --mib     raw bytes of a block (default 64)
// --rounds  rounds a case (default 7)
//
// Cases, of normally distributed weights:
//   bf16_tenth   a tenth of all values moved by one unit in the last place, as in `paramwire bench checkpoint`
//   bf16_sparse  bf16 weights without a master copy late in a training by AdamW at 1e-5: 0.5 % changed, the smallest ones
//   f32_dense    f32 weights, an update of about 1e-5 of each
// A round times memcpy, encode_delta(), apply_delta() beside the base and in place, by one thread (its processor time, so that other work on the machine
// matters less) and by two (time on the clock); figures are of the fastest round, which was disturbed least.
// Every result is compared with what it should be; a wrong one ends the run with exit code 1.
// lz4_of_delta: bytes of the delta after LZ4. lz4_of_varints: bytes of the changed elements' distances and steps as varints, after LZ4, in place of a delta's code tables.
#include "paramwire/base/bytes.hpp"
#include "paramwire/codec/block.hpp"
#include "paramwire/codec/cast.hpp"
#include "paramwire/codec/delta.hpp"
#include "paramwire/codec/delta_piece.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <ctime>
#include <string_view>
#include <vector>

namespace {

using namespace paramwire;
using Bytes = std::vector<std::byte>;

constexpr Version kBase{1, 1};

struct Case {
  std::string_view name;
  DType dtype;
  Bytes base{}, next{};
};

// Fills `made` with `bytes` bytes of base and result.
void make(Case& made, std::size_t bytes) {
  const std::size_t word = dtype_bits(made.dtype) / 8;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const bool tenth = made.name == "bf16_tenth";
  const float width = tenth ? 0.02F : 0.04F, rate = word == 4 ? 1e-5F : 8e-7F;
  made.base.resize(bytes);
  made.next.resize(bytes);
  for (std::size_t i = 0; i < bytes / word; ++i) {
    const float weight = width * normal(random);
    if (word == 4) {
      store_le(made.base.data() + 4 * i, std::bit_cast<std::uint32_t>(weight));
      store_le(made.next.data() + 4 * i, std::bit_cast<std::uint32_t>(weight + rate * normal(random)));
      continue;
    }
    const std::uint16_t before = bf16_from_f32(std::bit_cast<std::uint32_t>(weight));
    const float updated = std::bit_cast<float>(f32_from_bf16(before)) + rate * normal(random);
    const auto after = tenth ? static_cast<std::uint16_t>(before + (random() % 10 == 0 ? 1 : 0)) : bf16_from_f32(std::bit_cast<std::uint32_t>(updated));
    store_le(made.base.data() + 2 * i, before);
    store_le(made.next.data() + 2 * i, after);
  }
}

std::size_t lz4_size(const Bytes& bytes) {
  EncodedBlock block;
  if (!encode_block(CodecSpec{std::nullopt, CodecId::kLz4}, DType::kU8, bytes, 1, block).ok()) return 0;
  return block.bytes.size();
}

// What gap coding without code tables makes of a block: distance and step of each changed element.
Bytes varints(const Case& made, double& changed) {
  Bytes out;
  ByteWriter put(out);
  delta::with_word(delta::element_of(made.dtype).bytes, [&](auto kind) {
    using U = decltype(kind);
    std::size_t before = 0, count = 0;
    const std::size_t elements = made.base.size() / sizeof(U);
    for (std::size_t i = 0; i < elements; ++i) {
      const U from = delta::load<U>(made.base.data(), i), to = delta::load<U>(made.next.data(), i);
      if (from == to) continue;
      put.varint(i - before);
      put.varint(delta::step_between<U>(delta::ordered(from), delta::ordered(to)));
      before = i + 1;
      ++count;
    }
    changed = static_cast<double>(count) / static_cast<double>(elements);
  });
  return out;
}

// Times of each kind of work, in seconds.
struct Times {
  std::vector<double> copy, encode, beside, in_place;
};

double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool run_case(const Case& made, std::size_t rounds, unsigned threads) {
  Times times;
  Bytes out(made.base.size()), block(made.base.size()), delta;
  bool right = true;
  const auto timed = [clock = threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC](std::vector<double>& times_of, auto&& work) {
    const double start = seconds(clock);
    work();
    times_of.push_back(seconds(clock) - start);
  };
  for (std::size_t round = 0; round < rounds; ++round) {
    timed(times.copy, [&] { std::memcpy(block.data(), made.base.data(), block.size()); });
    timed(times.encode, [&] {
      auto encoded = encode_delta(made.dtype, made.base, {kBase}, made.next, threads);
      right &= encoded.ok();
      if (encoded.ok()) delta = *std::move(encoded);
    });
    timed(times.beside, [&] { right &= apply_delta(delta, made.dtype, made.base, kBase, out, threads).ok(); });
    timed(times.in_place, [&] { right &= apply_delta(delta, made.dtype, block, kBase, block, threads).ok(); });
    right = right && out == made.next && block == made.next;
    if (!right) {
      std::fprintf(stderr, "delta_bench: %s came back with other bytes, or not at all\n", made.name.data());
      return false;
    }
  }
  const auto speed = [&](const std::vector<double>& spent) { return static_cast<double>(made.base.size()) / *std::min_element(spent.begin(), spent.end()) * 1e-9; };
  double changed = 0;
  const Bytes plain = varints(made, changed);
  std::printf("{\"bench\": \"delta\", \"case\": \"%s\", \"bytes\": %zu, \"changed\": %.4f, \"threads\": %u, \"delta_bytes\": %zu, \"lz4_of_delta\": %zu, "
              "\"varints\": %zu, \"lz4_of_varints\": %zu, \"memcpy_gb_per_s\": %.2f, \"encode_gb_per_s\": %.3f, \"apply_gb_per_s\": %.3f, "
              "\"apply_in_place_gb_per_s\": %.3f}\n",
              made.name.data(), made.base.size(), changed, threads, delta.size(), lz4_size(delta), plain.size(), lz4_size(plain), speed(times.copy),
              speed(times.encode), speed(times.beside), speed(times.in_place));
  std::fflush(stdout);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t mib = 64, rounds = 7;
  std::string_view only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view option = argv[i];
    if (option == "--mib") mib = std::strtoull(argv[i + 1], nullptr, 10);
    else if (option == "--rounds") rounds = std::strtoull(argv[i + 1], nullptr, 10);
    else if (option == "--case") only = argv[i + 1];
    else argc = 0;
  }
  if (argc % 2 == 0 || mib == 0 || rounds == 0) {
    std::fprintf(stderr, "usage: delta_bench [--mib N] [--rounds N] [--case bf16_tenth|bf16_sparse|f32_dense]\n");
    return 2;
  }
  Case cases[] = {{"bf16_tenth", DType::kBF16}, {"bf16_sparse", DType::kBF16}, {"f32_dense", DType::kF32}};
  for (Case& made : cases) {
    if (!only.empty() && only != made.name) continue;
    make(made, mib << 20);
    for (const unsigned threads : {1U, 2U}) {
      if (!run_case(made, rounds, threads)) return 1;
    }
    made = {};
  }
  return 0;
}
