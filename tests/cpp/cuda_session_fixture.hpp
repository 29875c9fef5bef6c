// A session on a simulated device that is given its pieces by hand, out of page-locked memory in which each has its place.
#pragma once

#include "cpp/cuda_backend_rig.hpp"
#include "paramwire/base/crc.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

namespace paramwire::testing {

inline constexpr std::uint64_t kSeed = 300;

inline const std::vector<Token> kTokens = {3, 41};

// The model's pieces in page-locked memory, each at its place, so that nothing but the device decides when they are read.
class SessionFixture {
 public:
  SessionFixture(SimCudaOptions options, std::uint64_t rows, std::size_t stay, std::uint64_t window_bytes, std::uint32_t resident_sets = 1, std::uint64_t planes_bytes = 0)
      : graph_(must(llama_graph(oracle::small_llama(), Naming::kGguf))), tensors_(oracle::random_tensors(graph_, DType::kF32, kSeed)), gpu_(std::move(options)),
        binding_(must(graph_.bind(oracle::infos(tensors_)))) {
    SessionOptions session;
    session.context_tokens = 16;
    session.step_tokens = 4;
    session.window_bytes = window_bytes;
    session.resident_sets = resident_sets;
    session.planes_bytes = planes_bytes;
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
      const Need& each = binding_.needs()[need];
      if (each.access != Access::kWhole) continue;
      const bool vector = graph_.parameters()[each.parameter].shape.rank() == 1;
      for (std::uint64_t row = 0; row < each.rows; row += rows) {
        const std::uint64_t end = std::min(each.rows, row + rows);
        session.pieces.push_back({need, row, end, vector || (stay > 0 && count++ % stay == 0)});
        offsets_.push_back(bytes);
        bytes += (end - row) * each.row_bytes;
        bytes = (bytes + 63) / 64 * 64;
      }
    }
    pieces_ = session.pieces;
    staging_ = must(gpu_.backend->allocate_staging(bytes));
    load(kSeed);
    session_ = must(gpu_.backend->open_session(binding_, session));
  }

  // Other weights, in the same places. with_rows: what steps are given as rows by data is of them, too.
  void load(std::uint64_t seed, bool with_rows = true) {
    tensors_ = oracle::random_tensors(graph_, DType::kF32, seed);
    if (with_rows) rows_ = tensors_;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const auto from = bytes_of(i);
      std::copy(from.begin(), from.end(), staged(i).begin());
    }
  }
  std::span<const std::byte> bytes_of(std::size_t piece) const {
    const PieceLayout& layout = pieces_[piece];
    const Need& need = binding_.needs()[layout.need];
    return std::span<const std::byte>(tensors_.at(need.tensor).bytes)
        .subspan(static_cast<std::size_t>(layout.row_begin * need.row_bytes), static_cast<std::size_t>((layout.row_end - layout.row_begin) * need.row_bytes));
  }
  std::span<std::byte> staged(std::size_t piece) { return staging_->span().subspan(static_cast<std::size_t>(offsets_[piece]), bytes_of(piece).size()); }

  // What is pending, if it is rows by data.
  Status supply_rows() {
    while (const Pending* pending = session_->pending()) {
      const Need& need = binding_.needs()[pending->need];
      if (need.access != Access::kRowsByData) return {};
      WeightView view{.tensor = need.tensor, .dtype = need.dtype, .row_begin = pending->next_row, .row_end = pending->next_row + 1, .data = {}};
      view.data = std::span<const std::byte>(rows_.at(need.tensor).bytes).subspan(static_cast<std::size_t>(view.row_begin * need.row_bytes), static_cast<std::size_t>(need.row_bytes));
      PARAMWIRE_CHECK(session_->supply(view));
    }
    return {};
  }
  std::size_t next_piece() const {
    const Pending& pending = *session_->pending();
    return static_cast<std::size_t>(std::find_if(pieces_.begin(), pieces_.end(), [&](const PieceLayout& each) { return each.need == pending.need && each.row_begin == pending.next_row; }) -
                                    pieces_.begin());
  }
  Status supply_next(std::span<const ExtentCheck> checks) {
    return session_->supply(view(next_piece(), checks));
  }
  WeightView view(std::size_t piece, std::span<const ExtentCheck> checks) {
    const Need& need = binding_.needs()[pieces_[piece].need];
    return {.tensor = need.tensor, .dtype = need.dtype, .row_begin = pieces_[piece].row_begin, .row_end = pieces_[piece].row_end, .data = staged(piece), .checks = checks};
  }
  // What the piece must be, as the tensors say.
  ExtentCheck check(std::size_t piece) const { return {.offset = 0, .size = static_cast<std::uint32_t>(bytes_of(piece).size()), .crc32c = crc32c(bytes_of(piece))}; }

  // One step of one token. supplied: called after each piece, with its number.
  template <typename Supplied>
  Result<std::vector<float>> step(Token token, const Supplied& supplied) {
    PARAMWIRE_CHECK(session_->begin({&token, 1}));
    PARAMWIRE_CHECK(supply_rows());
    while (session_->pending() != nullptr) {
      const std::size_t at = next_piece();
      const ExtentCheck must_be = check(at);
      PARAMWIRE_CHECK(supply_next(with_checks ? std::span(&must_be, 1) : std::span<const ExtentCheck>()));
      supplied(at);
    }
    PARAMWIRE_TRY(logits, session_->finish());
    return testing::copy(logits);
  }
  Result<std::vector<float>> step(Token token) {
    return step(token, [](std::size_t) {});
  }

  std::vector<std::vector<float>> cpu_logits() const {
    const auto backend = must(open_backend("cpu", {.threads = 1}));
    const auto session = must(backend->open_session(binding_, {}));
    std::vector<std::vector<float>> out;
    for (const Token token : kTokens) out.push_back(must(oracle::step(*session, tensors_, {&token, 1}, 1'000'000)));
    return out;
  }

  bool with_checks = false;  // every piece is to be compared on the device with what it must be

  SimCuda& sim() { return gpu_.sim; }
  Session& session() { return *session_; }
  void close() {
    session_.reset();
    staging_.reset();
    gpu_.backend.reset();
  }
  std::size_t pieces() const { return pieces_.size(); }
  bool stays(std::size_t piece) const { return pieces_[piece].resident; }

 private:
  Graph graph_;
  oracle::Tensors tensors_, rows_;
  Gpu gpu_;
  Binding binding_;
  std::vector<PieceLayout> pieces_;
  std::vector<std::uint64_t> offsets_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Session> session_;
};

}  // namespace paramwire::testing
