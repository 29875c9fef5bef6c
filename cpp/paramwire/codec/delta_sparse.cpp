// Sparse pieces: where the changed elements are, as distances from one to the next of the same class, and the steps that they took.
#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_kernels.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace paramwire::delta {
namespace {

// A class's byte in a piece.
constexpr std::uint8_t kDense = 1;      // every element has a step
constexpr std::uint8_t kNewDistances = 2;  // it and those that follow have their own code table for distances
constexpr std::uint8_t kNewSteps = 4;      // and for steps

// Bit c: class c is dense.
std::uint32_t dense_bits(const std::array<bool, kClassesMax>& dense) noexcept {
  std::uint32_t bits = 0;
  for (std::size_t c = 0; c < kClassesMax; ++c) bits |= static_cast<std::uint32_t>(dense[c]) << c;
  return bits;
}

// With fewer changes, what classes cost may be more than what they save: both are tried.
constexpr std::size_t kSurelyByClass = 1024;

// ---------------------------------------------------------------- encoding

// Runs body(i) for every set bit i of `words`, from the lowest on.
template <typename Body>
void for_each_set(std::span<const std::uint64_t> words, Body&& body) {
  for (std::size_t w = 0; w < words.size(); ++w) {
    for (std::uint64_t rest = words[w]; rest != 0; rest &= rest - 1) body(w * kWordElements + static_cast<std::size_t>(std::countr_zero(rest)));
  }
}

// Fills scratch.steps with those of the changed elements, in order.
template <typename U>
void fill_steps(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::size_t changed, EncodeScratch& scratch) {
  scratch.steps.resize(changed * sizeof(U));
  std::size_t k = 0;
  for_each_set(scratch.changed, [&, floating = element.floating, steps = scratch.steps.data()](std::size_t i) {
    const U from = load<U>(base.data(), i), to = load<U>(next.data(), i);
    store<U>(steps, k++, floating ? step_between<U>(ordered(from), ordered(to)) : step_between<U>(from, to));
  });
}

// Fills scratch.classes and scratch.distances (those before the first change of each class, then that behind each changed element, in order), and
// counts all of them.
template <typename U>
void take_census(const Element& element, const Classes& classes, std::span<const std::byte> base, std::size_t changed, EncodeScratch& scratch,
                 Census& census) {
  scratch.classes.resize(scratch.changed.size() * kWordElements);
  scratch.distances.resize(classes.count + changed);
  census = {};
  find_classes(element, classes, base, scratch.classes.data());
  measure_distances(scratch.classes.data(), scratch.changed.data(), base.size() / sizeof(U), classes.count, scratch.distances.data(), census.elements);
  const auto count_distance = [&](std::size_t c, std::uint32_t distance) {
    const symbols::Symbol symbol = symbols::symbol_of(distance);
    ++census.distances[c][symbol.symbol];
    census.distance_bits[c] += symbol.extra;
  };
  const std::uint32_t* distance = scratch.distances.data();
  for (std::size_t c = 0; c < classes.count; ++c) count_distance(c, *distance++);
  std::size_t k = 0;
  for_each_set(scratch.changed, [&](std::size_t i) {
    const std::uint8_t c = scratch.classes[i];
    ++census.steps[c][symbols::symbol_of(load<U>(scratch.steps.data(), k++)).symbol];
    ++census.changed[c];
    count_distance(c, *distance++);
  });
}

// Makes classes dense where that is smaller. returns: estimated bytes, and which classes share tables
double plan(Census& census, unsigned classes, Groups& distance_groups, Groups& step_groups) {
  std::array<huffman::Counts, kClassesMax> distances = census.distances;
  double raw_bits = 0;
  for (unsigned c = 0; c < classes; ++c) {
    huffman::Counts all = census.steps[c];
    all[0] = census.elements[c] - census.changed[c];
    const double sparse = symbols::estimate(census.distances[c], false) + static_cast<double>(census.distance_bits[c]) / 8 + symbols::estimate(census.steps[c], false);
    // Distances between few changes are faster to read than a step of 0 for each of the others.
    census.dense[c] = census.changed[c] > census.elements[c] / 4 && symbols::estimate(all, false) < sparse;
    if (census.dense[c]) {
      census.steps[c] = all;
      distances[c] = {};
    } else {
      raw_bits += static_cast<double>(census.distance_bits[c]);
    }
  }
  return share_tables(distances, classes, distance_groups) + share_tables(census.steps, classes, step_groups) + raw_bits / 8 + classes;
}

// Symbols of several code tables in one buffer.
class SymbolWriter {
 public:
  // counts: symbols of each class; groups: the table of each class
  SymbolWriter(std::vector<std::uint8_t>& buffer, const std::array<std::uint32_t, kClassesMax>& counts, const Groups& groups, unsigned classes)
      : buffer_(buffer), tables_(groups[classes - 1] + 1U) {
    std::array<std::size_t, kClassesMax> sizes{};
    for (unsigned c = 0; c < classes; ++c) sizes[groups[c]] += counts[c];
    std::size_t total = 0;
    for (unsigned t = 0; t < tables_; ++t) {
      begin_[t] = at_[t] = total;
      total += sizes[t];
    }
    buffer_.resize(total);
  }
  void put(std::uint8_t table, std::uint64_t number) {
    const symbols::Symbol symbol = symbols::symbol_of(number);
    buffer_[at_[table]++] = symbol.symbol;
    bits_.put(number & ((std::uint64_t{1} << symbol.extra) - 1), symbol.extra);
  }
  void finish_tables(std::vector<std::byte>& out, huffman::EncodeTable& table) {
    for (unsigned t = 0; t < tables_; ++t) {
      ByteWriter(out).varint(at_[t] - begin_[t]);
      symbols::put(out, std::span(buffer_).subspan(begin_[t], at_[t] - begin_[t]), table);
    }
  }
  void finish_bits(std::vector<std::byte>& out) {
    const auto& bits = bits_.finish();
    ByteWriter(out).varint(bits.size());
    out.insert(out.end(), bits.begin(), bits.end());
  }

 private:
  std::vector<std::uint8_t>& buffer_;
  unsigned tables_;
  std::array<std::size_t, kClassesMax> begin_{}, at_{};
  symbols::BitWriter bits_;
};

template <typename U>
void write_piece(const Classes& classes, const Census& census, const Groups& distance_groups, const Groups& step_groups, EncodeScratch& scratch,
                 std::vector<std::byte>& out) {
  ByteWriter head(out);
  head.put(static_cast<std::uint8_t>(classes.count));
  head.put(static_cast<std::uint16_t>(classes.top));
  std::array<std::uint32_t, kClassesMax> distance_counts{}, step_counts{};
  for (unsigned c = 0; c < classes.count; ++c) {
    std::uint8_t flags = census.dense[c] ? kDense : 0;
    if (c == 0 || distance_groups[c] != distance_groups[c - 1]) flags |= kNewDistances;
    if (c == 0 || step_groups[c] != step_groups[c - 1]) flags |= kNewSteps;
    head.put(flags);
    distance_counts[c] = census.dense[c] ? 0 : census.changed[c] + 1;
    step_counts[c] = census.dense[c] ? census.elements[c] : census.changed[c];
  }
  SymbolWriter distances(scratch.symbols, distance_counts, distance_groups, classes.count);
  SymbolWriter steps(scratch.more_symbols, step_counts, step_groups, classes.count);
  const std::uint32_t* distance = scratch.distances.data();
  for (std::size_t c = 0; c < classes.count; ++c, ++distance) {
    if (!census.dense[c]) distances.put(distance_groups[c], *distance);
  }
  // Of the elements of dense classes those have a step, too, that did not change.
  scratch.with_step.resize(scratch.changed.size());
  find_elements_of(scratch.classes.data(), scratch.classes.size(), dense_bits(census.dense), scratch.with_step.data());
  for (std::size_t w = 0; w < scratch.changed.size(); ++w) scratch.with_step[w] |= scratch.changed[w];
  std::size_t k = 0;
  for_each_set(scratch.with_step, [&](std::size_t i) {
    const std::uint8_t c = scratch.classes[i];
    if ((scratch.changed[i / kWordElements] >> (i % kWordElements) & 1) == 0) {
      steps.put(step_groups[c], 0);
      return;
    }
    steps.put(step_groups[c], load<U>(scratch.steps.data(), k++));
    if (!census.dense[c]) distances.put(distance_groups[c], *distance);
    ++distance;
  });
  distances.finish_tables(out, scratch.table);
  steps.finish_tables(out, scratch.table);
  distances.finish_bits(out);
  steps.finish_bits(out);
}

// ---------------------------------------------------------------- decoding

Error corrupt(std::string why) { return {Code::kCorrupt, std::move(why)}; }

// Reads the tables' symbols into `buffer`. limit: most symbols in all
Status read_tables(ByteReader& in, std::string_view what, std::uint64_t limit, Streams& streams, std::vector<std::uint8_t>& buffer,
                   huffman::DecodeTable& table) {
  buffer.resize(static_cast<std::size_t>(limit));
  std::size_t used = 0;
  for (unsigned t = 0; t < streams.count; ++t) {
    const std::uint64_t count = in.varint();
    if (!in.ok() || count > limit - used) return corrupt(cat("table ", t, " of ", what, " has ", count, " symbols; at most ", limit - used, " can be"));
    const auto target = std::span(buffer).subspan(used, static_cast<std::size_t>(count));
    if (const auto status = symbols::get(in, target, table); !status.ok()) return corrupt(cat("table ", t, " of ", what, ' ', status.error().message()));
    std::uint8_t largest = 0;
    for (const std::uint8_t symbol : target) largest = std::max(largest, symbol);
    if (largest >= symbols::kSymbolsMax) return corrupt(cat("table ", t, " of ", what, " has symbol ", largest, ", which is none"));
    streams.tables[t] = {target.data(), target.data() + target.size()};
    used += target.size();
  }
  return {};
}

template <typename U>
U moved(bool floating, U base, U step) noexcept {
  return floating ? ordered<U>(after_step<U>(ordered<U>(base), step)) : after_step<U>(base, step);
}

// One class without dense: from change to change, nothing in between is touched.
template <typename U>
Status apply_one_class(const Element& element, NumberReader& distances, NumberReader& steps, std::span<const std::byte> base, std::span<std::byte> out) {
  const std::size_t elements = base.size() / sizeof(U);
  if (out.data() != base.data()) std::memcpy(out.data(), base.data(), base.size());
  for (std::size_t i = 0;; ++i) {
    const std::uint64_t distance = distances.get(0);
    if (distances.failed) return corrupt("the distances end early");
    if (distance > elements - i) return corrupt(cat("element ", i, " is followed by a distance of ", distance, " among ", elements, " elements"));
    i += static_cast<std::size_t>(distance);
    if (i == elements) return {};
    const std::uint64_t step = steps.get(0);
    if (steps.failed || step == 0 || step > static_cast<U>(~U{0})) return corrupt(cat("the step of element ", i, " is ", step, ", or missing"));
    store<U>(out.data(), i, moved<U>(element.floating, load<U>(base.data(), i), static_cast<U>(step)));
  }
}

Status apply_by_class(const Element& element, const Classes& classes, const std::array<bool, kClassesMax>& dense, NumberReader& distances,
                      NumberReader& steps, std::span<const std::byte> base, std::span<std::byte> out) {
  using Kind = ApplyFault::Kind;
  const ApplyFault fault = apply_changes(element, classes, dense_bits(dense), distances, steps, base, out);
  switch (fault.kind) {
    case Kind::kNone: break;
    case Kind::kStepTooLong: return corrupt(cat("element ", fault.at, " has a step of ", fault.number));
    case Kind::kNoStep: return corrupt(cat("element ", fault.at, " changed by a step of 0, or its table ends early"));
    case Kind::kDistanceTooLong: return corrupt(cat("class ", fault.at, " has a distance that goes ", fault.number, " elements beyond its last"));
  }
  return {};
}

}  // namespace

void encode_sparse(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::size_t changed, unsigned classes_max,
                   std::vector<std::byte>& out, EncodeScratch& scratch) {
  with_word(element.bytes, [&](auto kind) {
    using U = decltype(kind);
    fill_steps<U>(element, base, next, changed, scratch);
    Classes classes = choose_classes(element, base, classes_max);
    Census census;
    Groups distance_groups, step_groups;
    take_census<U>(element, classes, base, changed, scratch, census);
    const double size = plan(census, classes.count, distance_groups, step_groups);
    if (classes.count > 1 && changed < kSurelyByClass) {
      const Classes by_exponent = classes;
      classes = {};
      take_census<U>(element, classes, base, changed, scratch, census);
      if (plan(census, 1, distance_groups, step_groups) > size) {
        classes = by_exponent;
        take_census<U>(element, classes, base, changed, scratch, census);
        plan(census, classes.count, distance_groups, step_groups);
      }
    }
    out.clear();
    write_piece<U>(classes, census, distance_groups, step_groups, scratch, out);
  });
}

Status decode_sparse(const Element& element, std::span<const std::byte> stored, std::span<const std::byte> base, std::span<std::byte> out,
                     DecodeScratch& scratch) {
  const std::uint64_t elements = base.size() / element.bytes;
  ByteReader in(stored);
  const auto count = in.get<std::uint8_t>();
  const auto top = in.get<std::uint16_t>();
  const auto flags = in.bytes(count);
  if (!in.ok() || count == 0 || count > (element.floating ? kClassesMax : 1)) return corrupt(cat("has ", count, " classes, or is cut"));
  if (count == 1 ? top != 0 : top > element.exponent_mask) return corrupt(cat("class 0 begins at exponent ", top));
  const Classes classes{count, top};
  Streams distances, steps;
  std::array<bool, kClassesMax> dense{};
  for (unsigned c = 0; c < count; ++c) {
    const auto flag = static_cast<std::uint8_t>(flags[c]);
    if (flag > (kDense | kNewDistances | kNewSteps) || (c == 0 && (flag | kDense) != (kDense | kNewDistances | kNewSteps))) {
      return corrupt(cat("class ", c, " has flags ", flag));
    }
    dense[c] = (flag & kDense) != 0;
    distances.count += (flag & kNewDistances) != 0 ? 1 : 0;
    steps.count += (flag & kNewSteps) != 0 ? 1 : 0;
    distances.groups[c] = static_cast<std::uint8_t>(distances.count - 1);
    steps.groups[c] = static_cast<std::uint8_t>(steps.count - 1);
  }
  PARAMWIRE_CHECK(read_tables(in, "distances", elements + count, distances, scratch.symbols, scratch.table));
  PARAMWIRE_CHECK(read_tables(in, "steps", elements, steps, scratch.more_symbols, scratch.table));
  distances.bits = in.bytes(in.varint());
  steps.bits = in.bytes(in.varint());
  if (!in.finished()) return corrupt("the raw bits are cut, or bytes are left over");
  NumberReader read_distance(distances), read_step(steps);
  PARAMWIRE_CHECK(with_word(element.bytes, [&](auto kind) -> Status {
    if (count == 1 && !dense[0]) return apply_one_class<decltype(kind)>(element, read_distance, read_step, base, out);
    return apply_by_class(element, classes, dense, read_distance, read_step, base, out);
  }));
  if (!read_distance.finished()) return corrupt("the distances end early, or some are left over");
  if (!read_step.finished()) return corrupt("the steps end early, or some are left over");
  return {};
}

}  // namespace paramwire::delta
