#include "gpu/session_rig.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/types.hpp"

#include <algorithm>
#include <cmath>

namespace paramwire::gpu {

namespace {

constexpr std::uint64_t kExtent = std::uint64_t{64} << 10;  // as servers cut blocks

}  // namespace

SessionRig::SessionRig(const World& world, const LlamaConfig& config, DType dtype, std::uint64_t rows, std::uint32_t sets)
    : graph_(must(llama_graph(config, Naming::kGguf))), dtype_(dtype), sets_(sets), first_(oracle::random_tensors(graph_, dtype, 1)),
      backend_(must(open_cuda_backend(world.driver, world.blas, world.blas_problem, 0))), binding_(must(graph_.bind(oracle::infos(first_)))) {
  SessionOptions options;
  options.context_tokens = 16;
  options.step_tokens = 4;
  std::uint64_t bytes = 0, largest = 0;
  for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
    const Need& each = binding_.needs()[need];
    if (each.access != Access::kWhole) continue;
    const bool vector = graph_.parameters()[each.parameter].shape.rank() == 1;
    for (std::uint64_t row = 0; row < each.rows; row += rows) {
      pieces_.push_back({need, row, std::min(each.rows, row + rows), vector || sets > 1});
      offsets_.push_back(bytes);
      bytes += (bytes_of(pieces_.size() - 1) + 63) / 64 * 64;
      largest = std::max(largest, bytes_of(pieces_.size() - 1));
    }
  }
  options.pieces = pieces_;
  options.resident_sets = sets;
  options.window_bytes = 2 * (2 * largest + 4096);
  checks_.resize(pieces_.size());
  staging_ = must(backend_->allocate_staging(bytes));
  session_ = must(backend_->open_session(binding_, options));
}

oracle::Tensors SessionRig::tensors(std::uint64_t seed) const {
  oracle::Tensors out = oracle::random_tensors(graph_, dtype_, seed);
  for (auto& [name, tensor] : out) {
    if (tensor.shape.rank() == 1 && sets_ == 1) tensor = first_.at(name);
  }
  return out;
}

std::uint64_t SessionRig::bytes_of(std::size_t piece) const {
  return (pieces_[piece].row_end - pieces_[piece].row_begin) * binding_.needs()[pieces_[piece].need].row_bytes;
}

std::span<std::byte> SessionRig::staged(std::size_t piece) {
  return staging_->span().subspan(static_cast<std::size_t>(offsets_[piece]), static_cast<std::size_t>(bytes_of(piece)));
}

void SessionRig::load(const oracle::Tensors& tensors) {
  rows_ = tensors;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Need& need = binding_.needs()[pieces_[i].need];
    const auto target = staged(i);
    const auto from = std::span<const std::byte>(tensors.at(need.tensor).bytes).subspan(static_cast<std::size_t>(pieces_[i].row_begin * need.row_bytes), target.size());
    std::copy(from.begin(), from.end(), target.begin());
    checks_[i].clear();
    for (std::uint64_t at = 0; at < from.size(); at += kExtent) {
      const auto size = static_cast<std::uint32_t>(std::min<std::uint64_t>(kExtent, from.size() - at));
      checks_[i].push_back({.offset = at, .size = size, .crc32c = crc32c(from.subspan(static_cast<std::size_t>(at), size))});
    }
  }
}

Status SessionRig::supply(const Pending& pending) {
  const Need& need = binding_.needs()[pending.need];
  WeightView view{.tensor = need.tensor, .dtype = need.dtype, .row_begin = pending.next_row, .row_end = pending.next_row + 1, .data = {}};
  if (need.access == Access::kRowsByData) {
    view.data = std::span<const std::byte>(rows_.at(need.tensor).bytes).subspan(static_cast<std::size_t>(view.row_begin * need.row_bytes), static_cast<std::size_t>(need.row_bytes));
    return session_->supply(view);
  }
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [&](const PieceLayout& each) { return each.need == pending.need && each.row_begin == pending.next_row; });
  return session_->supply(view_of(static_cast<std::size_t>(found - pieces_.begin())));
}

WeightView SessionRig::view_of(std::size_t piece) {
  const Need& need = binding_.needs()[pieces_[piece].need];
  return {.tensor = need.tensor, .dtype = need.dtype, .row_begin = pieces_[piece].row_begin, .row_end = pieces_[piece].row_end, .data = staged(piece), .checks = checks_[piece]};
}

Status SessionRig::stage_and_swap() {
  for (std::size_t piece = 0; piece < pieces_.size(); ++piece) PARAMWIRE_CHECK(session_->stage(piece, view_of(piece)));
  PARAMWIRE_CHECK(session_->staged());
  return session_->swap();
}

Result<std::vector<float>> SessionRig::step(Token token) {
  PARAMWIRE_CHECK(session_->begin({&token, 1}));
  while (const Pending* pending = session_->pending()) PARAMWIRE_CHECK(supply(*pending));
  PARAMWIRE_TRY(logits, session_->finish());
  return std::vector<float>(logits.begin(), logits.end());
}

std::vector<float> SessionRig::cpu_logits(const oracle::Tensors& tensors, std::span<const Token> tokens) const {
  const auto backend = must(open_backend("cpu", {.threads = 1}));
  const auto session = must(backend->open_session(binding_, {}));
  std::vector<float> out;
  for (const Token token : tokens) out = must(oracle::step(*session, tensors, {&token, 1}, 1'000'000));
  return out;
}

float largest_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return INFINITY;
  float most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const float difference = std::fabs(a[i] - b[i]) / std::max(1.0F, std::fabs(b[i]));
    most = std::isnan(difference) ? INFINITY : std::max(most, difference);
  }
  return most;
}

}  // namespace paramwire::gpu
