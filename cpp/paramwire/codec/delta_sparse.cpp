// Sparse pieces: where the changed elements are, as distances from one to the next of the same class, and the steps that they took.
#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_classes.hpp"
#include "paramwire/codec/delta_piece.hpp"

#include <algorithm>
#include <utility>

namespace paramwire::delta {
namespace {

// A class's byte in a piece.
constexpr std::uint8_t kDense = 1;      // every element has a step
constexpr std::uint8_t kNewDistances = 2;  // it and those that follow have their own code table for distances
constexpr std::uint8_t kNewSteps = 4;      // and for steps

// With fewer changes, what classes cost may be more than what they save: both are tried.
constexpr std::size_t kSurelyByClass = 1024;

// Classes of `count` elements: a loop of its own, without a table, so that the compiler can make vectors of it.
template <typename U>
void class_block(const Element& element, const Classes& classes, const std::byte* base, std::size_t count, std::uint8_t* target) noexcept {
  const auto shift = element.exponent_shift % (8 * sizeof(U));
  const auto mask = static_cast<U>(element.exponent_mask), top = static_cast<U>(classes.top), last = static_cast<U>(classes.count - 1);
  for (std::size_t i = 0; i < count; ++i) {
    const U exponent = std::min(static_cast<U>(static_cast<U>(load<U>(base, i) >> shift) & mask), top);
    target[i] = static_cast<std::uint8_t>(std::min(static_cast<U>(top - exponent), last));
  }
}

// ---------------------------------------------------------------- encoding

template <typename U>
void fill_steps(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, EncodeScratch& scratch) {
  scratch.steps.resize(base.size());
  const std::size_t elements = base.size() / sizeof(U);
  if (element.floating) {
    for (std::size_t i = 0; i < elements; ++i) {
      store<U>(scratch.steps.data(), i, step_between<U>(ordered(load<U>(base.data(), i)), ordered(load<U>(next.data(), i))));
    }
  } else {
    for (std::size_t i = 0; i < elements; ++i) store<U>(scratch.steps.data(), i, step_between<U>(load<U>(base.data(), i), load<U>(next.data(), i)));
  }
}

// Fills scratch.classes and scratch.distances: those before the first change of each class, then that after each changed element, in
// order. Counts all of them.
template <typename U>
void take_census(const Element& element, const Classes& classes, std::span<const std::byte> base, std::size_t changed, EncodeScratch& scratch,
                 Census& census) {
  const std::size_t elements = base.size() / sizeof(U);
  scratch.classes.resize(elements);
  class_block<U>(element, classes, base.data(), elements, scratch.classes.data());
  huffman::Counts in_class{};
  huffman::histogram(scratch.classes.data(), elements, in_class);
  scratch.distances.resize(classes.count + changed);
  census = {};
  std::copy_n(in_class.begin(), kClassesMax, census.elements.begin());
  std::array<std::uint32_t, kClassesMax> run{}, slot{};
  for (std::uint32_t c = 0; c < classes.count; ++c) slot[c] = c;
  std::uint32_t slots = classes.count;
  const auto end_run = [&](std::size_t c) {
    scratch.distances[slot[c]] = run[c];
    const symbols::Symbol symbol = symbols::symbol_of(run[c]);
    ++census.distances[c][symbol.symbol];
    census.distance_bits[c] += symbol.extra;
  };
  for (std::size_t i = 0; i < elements; ++i) {
    const std::uint8_t c = scratch.classes[i];
    const U step = load<U>(scratch.steps.data(), i);
    if (step == 0) {
      ++run[c];
      continue;
    }
    ++census.steps[c][symbols::symbol_of(step).symbol];
    ++census.changed[c];
    end_run(c);
    run[c] = 0;
    slot[c] = slots++;
  }
  for (std::uint32_t c = 0; c < classes.count; ++c) end_run(c);
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
    if (symbol.extra > 0) bits_.put(number & ((std::uint64_t{1} << symbol.extra) - 1), symbol.extra);
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
  std::size_t slot = 0;
  for (; slot < classes.count; ++slot) {
    if (!census.dense[slot]) distances.put(distance_groups[slot], scratch.distances[slot]);
  }
  for (std::size_t i = 0; i < scratch.classes.size(); ++i) {
    const std::uint8_t c = scratch.classes[i];
    const U step = load<U>(scratch.steps.data(), i);
    if (step == 0 && !census.dense[c]) continue;
    steps.put(step_groups[c], step);
    if (step == 0) continue;
    if (!census.dense[c]) distances.put(distance_groups[c], scratch.distances[slot]);
    ++slot;
  }
  distances.finish_tables(out, scratch.table);
  steps.finish_tables(out, scratch.table);
  distances.finish_bits(out);
  steps.finish_bits(out);
}

// ---------------------------------------------------------------- decoding

Error corrupt(std::string why) { return {Code::kCorrupt, std::move(why)}; }

// What a piece's classes are, and the symbols of their tables.
struct Streams {
  // Where each class reads; classes of one table share the entry of `table`.
  struct Table {
    const std::uint8_t* at = nullptr;
    const std::uint8_t* end = nullptr;
  };
  std::array<Table, kClassesMax> tables{};
  Groups groups{};
  unsigned count = 0;
  std::span<const std::byte> bits;
};

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
    const auto largest = target.empty() ? target.end() : std::max_element(target.begin(), target.end());
    if (largest != target.end() && *largest >= symbols::kSymbolsMax) return corrupt(cat("table ", t, " of ", what, " has symbol ", *largest, ", which is none"));
    streams.tables[t] = {target.data(), target.data() + target.size()};
    used += target.size();
  }
  return {};
}

// Numbers of several classes in the order of the piece.
class NumberReader {
 public:
  explicit NumberReader(const Streams& streams) : streams_(streams), bits_(streams.bits) {}

  // Sets `failed` when the class's table has no more.
  std::uint64_t get(std::size_t c) noexcept {
    Streams::Table& table = streams_.tables[streams_.groups[c]];
    if (table.at == table.end) [[unlikely]] {
      failed = true;
      return 0;
    }
    const std::uint8_t symbol = *table.at++;
    if (symbol < symbols::kPlainNumbers) return symbol;
    return symbols::least_number(symbol) | bits_.get(symbols::extra_bits(symbol));
  }
  bool finished() const noexcept {
    for (unsigned t = 0; t < streams_.count; ++t) {
      if (streams_.tables[t].at != streams_.tables[t].end) return false;
    }
    return !failed && bits_.finished();
  }

  bool failed = false;

 private:
  Streams streams_;
  symbols::BitReader bits_;
};

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

// Elements whose classes are found at once: few enough to stay in the first-level cache.
constexpr std::size_t kClassBlock = 1024;
template <typename U>
Status apply_by_class(const Element& element, const Classes& classes, const std::array<bool, kClassesMax>& dense, NumberReader& distances,
                      NumberReader& steps, std::span<const std::byte> base, std::span<std::byte> out) {
  const std::size_t elements = base.size() / sizeof(U);
  const bool floating = element.floating;
  // Unchanged elements of the class before its next changed one. A dense class has none, ever.
  std::array<std::uint32_t, kClassesMax> left{};
  for (unsigned c = 0; c < classes.count; ++c) {
    if (!dense[c]) left[c] = static_cast<std::uint32_t>(std::min<std::uint64_t>(distances.get(c), UINT32_MAX));
  }
  // Everything in the loop is a local of this function: through a store to `out` the compiler would have to read all of it again.
  NumberReader distance = distances, step_of = steps;
  std::array<std::uint8_t, kClassBlock> block;
  std::array<U, kClassBlock> words;
  for (std::size_t begin = 0; begin < elements; begin += kClassBlock) {
    const std::size_t count = std::min(kClassBlock, elements - begin);
    class_block<U>(element, classes, base.data() + begin * sizeof(U), count, block.data());
    std::memcpy(words.data(), base.data() + begin * sizeof(U), count * sizeof(U));
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint8_t c = block[i];
      if (const std::uint32_t unchanged = left[c]; unchanged != 0) {
        left[c] = unchanged - 1;
        continue;
      }
      const std::uint64_t step = step_of.get(c);
      if (step > static_cast<U>(~U{0})) return corrupt(cat("element ", begin + i, " has a step of ", step));
      words[i] = moved<U>(floating, words[i], static_cast<U>(step));
      if (dense[c]) continue;
      // A table that ended gives zeros.
      if (step == 0) return corrupt(cat("element ", begin + i, " changed by a step of 0, or its table ends early"));
      left[c] = static_cast<std::uint32_t>(std::min<std::uint64_t>(distance.get(c), UINT32_MAX));
    }
    std::memcpy(out.data() + begin * sizeof(U), words.data(), count * sizeof(U));
  }
  distances = distance;
  steps = step_of;
  for (unsigned c = 0; c < classes.count; ++c) {
    if (left[c] != 0) return corrupt(cat("class ", c, " has a distance that goes ", left[c], " elements beyond its last"));
  }
  return {};
}

}  // namespace

void encode_sparse(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::size_t changed, unsigned classes_max,
                   std::vector<std::byte>& out, EncodeScratch& scratch) {
  with_word(element.bytes, [&](auto kind) {
    using U = decltype(kind);
    fill_steps<U>(element, base, next, scratch);
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
    using U = decltype(kind);
    if (count == 1 && !dense[0]) return apply_one_class<U>(element, read_distance, read_step, base, out);
    return apply_by_class<U>(element, classes, dense, read_distance, read_step, base, out);
  }));
  if (!read_distance.finished()) return corrupt("the distances end early, or some are left over");
  if (!read_step.finished()) return corrupt("the steps end early, or some are left over");
  return {};
}

}  // namespace paramwire::delta
