// Weights from page-locked memory to the device, compared there with what the server sealed, beside plain copies of the same pieces.
//
// The verified way is a session's own: supply() copies a piece and its checksums, sums its extents behind the copy, and finish() reads the verdict. The
// computation is one product over all that was copied, which a GPU does in a hundredth of the time.
#include "bench.hpp"

#include "gpu/case_make.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/compute/cuda_backend.hpp"
#include "paramwire/compute/graph.hpp"

#include <cmath>
#include <cstring>

namespace paramwire::gpu {

using namespace cuda;

namespace {

constexpr std::uint64_t kExtent = std::uint64_t{64} << 10;  // as servers cut blocks

class Pipeline {
 public:
  explicit Pipeline(Bench& bench)
      : bench_(bench), width_(bench.size<std::uint64_t>(64, 4096, 4096)), piece_rows_(bench.size<std::uint64_t>(1'100, 512, 512)), rows_(bench.size<std::uint64_t>(4'000, 16'384, 65'536)) {}

  Status run() {
    PARAMWIRE_CHECK(prepare());
    std::vector<double> verified, plain;
    const int warm_up = bench_.world.simulated ? 1 : 3;
    bool correct = true;
    for (int i = 0; i < warm_up + bench_.repetitions(); ++i) {
      const double begin = wall_seconds();
      PARAMWIRE_TRY(logits, step());
      const double middle = wall_seconds();
      correct = correct && right(logits);
      const double again = wall_seconds();
      PARAMWIRE_CHECK(copy_plainly());
      const double end = wall_seconds();
      if (i < warm_up) continue;
      verified.push_back(middle - begin);
      plain.push_back(end - again);
    }
    PARAMWIRE_TRY(seen, sees_damage());
    const double bytes = static_cast<double>(staging_->span().size());
    bench_.add({.name = "verified_host_to_device", .value = gigabytes(bytes, median(verified)), .unit = "GB/s", .baseline = "plain copies from page-locked memory",
                .baseline_value = gigabytes(bytes, median(plain)), .target = 0.9, .correct = correct && seen});
    return {};
  }

 private:
  static constexpr std::uint64_t kVocabulary = 16;

  Status prepare() {
    PARAMWIRE_TRY(backend, open_cuda_backend(bench_.world.driver, bench_.world.blas, bench_.world.blas_problem, 0));
    backend_ = std::move(backend);
    Graph graph;
    PARAMWIRE_CHECK(graph.embedding("x", "table", Shape{kVocabulary, width_}));
    PARAMWIRE_CHECK(graph.head("y", "x", "matrix", Shape{rows_, width_}));
    const TensorInfo tensors[] = {{"table", DType::kBF16, Shape{kVocabulary, width_}}, {"matrix", DType::kBF16, Shape{rows_, width_}}};
    PARAMWIRE_TRY(binding, graph.bind(tensors));
    table_ = random_weights("table", 1, {kVocabulary, width_}, 1);
    PARAMWIRE_TRY(staging, backend_->allocate_staging(rows_ * row_bytes()));
    staging_ = std::move(staging);
    fill();
    SessionOptions options;
    options.context_tokens = options.step_tokens = 1;
    std::size_t matrix = 0;
    while (binding.needs()[matrix].tensor != "matrix") ++matrix;
    for (std::uint64_t row = 0; row < rows_; row += piece_rows_) options.pieces.push_back({matrix, row, std::min(rows_, row + piece_rows_), false});
    pieces_ = options.pieces;
    options.window_bytes = 2 * (4 * piece_rows_ * row_bytes() + 4096);
    PARAMWIRE_TRY(session, backend_->open_session(binding, options));
    session_ = std::move(session);
    PARAMWIRE_TRY(target, bench_.bed.allocate(8 * piece_rows_ * row_bytes()));
    target_ = std::move(target);
    return {};
  }
  std::uint64_t row_bytes() const { return 2 * width_; }

  // bf16 between -2 and 2, by a generator that is quick, and what a server would have sealed.
  void fill() {
    Random random(7);
    const auto bytes = staging_->span();
    for (std::size_t at = 0; at < bytes.size(); at += 8) {
      // Exponents 01111111 and below by a bit: numbers of 1 to 2, or 0.5 to 1, of either sign.
      const std::uint64_t word = (random.next() & 0x80ff80ff80ff80ffU) | 0x3f003f003f003f00U;
      std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, bytes.size() - at));
    }
    for (std::uint64_t row = 0; row < rows_; row += piece_rows_) {
      const auto piece = piece_at(row, std::min(rows_, row + piece_rows_));
      checks_.emplace_back();
      for (std::uint64_t at = 0; at < piece.size(); at += kExtent) {
        const auto size = static_cast<std::uint32_t>(std::min<std::uint64_t>(kExtent, piece.size() - at));
        checks_.back().push_back({.offset = at, .size = size, .crc32c = crc32c(piece.subspan(static_cast<std::size_t>(at), size))});
      }
    }
  }
  std::span<std::byte> piece_at(std::uint64_t row_begin, std::uint64_t row_end) const {
    return staging_->span().subspan(static_cast<std::size_t>(row_begin * row_bytes()), static_cast<std::size_t>((row_end - row_begin) * row_bytes()));
  }

  Result<std::vector<float>> step() {
    const Token token = kToken;
    PARAMWIRE_CHECK(session_->rewind(0));
    PARAMWIRE_CHECK(session_->begin({&token, 1}));
    WeightView row{.tensor = "table", .dtype = DType::kBF16, .row_begin = token, .row_end = token + 1, .data = {}};
    row.data = std::span<const std::byte>(table_.bytes).subspan(static_cast<std::size_t>(token * row_bytes()), static_cast<std::size_t>(row_bytes()));
    PARAMWIRE_CHECK(session_->supply(row));
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      PARAMWIRE_CHECK(session_->supply({.tensor = "matrix", .dtype = DType::kBF16, .row_begin = pieces_[i].row_begin, .row_end = pieces_[i].row_end,
                                        .data = piece_at(pieces_[i].row_begin, pieces_[i].row_end), .checks = checks_[i]}));
    }
    PARAMWIRE_TRY(logits, session_->finish());
    return std::vector<float>(logits.begin(), logits.end());
  }
  // The same pieces into the same number of places.
  Status copy_plainly() {
    const Current current(*bench_.bed.device);
    PARAMWIRE_CHECK(current.status());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const CUdeviceptr at = target_.address() + i % 8 * piece_rows_ * row_bytes();
      PARAMWIRE_CHECK(bench_.bed.stream.to_device(at, piece_at(pieces_[i].row_begin, pieces_[i].row_end)));
    }
    return bench_.bed.stream.synchronize();
  }
  bool right(const std::vector<float>& logits) const {
    const std::uint64_t apart = std::max<std::uint64_t>(1, rows_ / 97);
    for (std::uint64_t row = 0; row < rows_; row += apart) {
      double sum = 0, size = 0;
      for (std::uint64_t c = 0; c < width_; ++c) {
        const double term = element(Type::kBF16, staging_->span(), static_cast<std::size_t>(row * width_ + c)) * element(Type::kBF16, table_.bytes, static_cast<std::size_t>(kToken * width_ + c));
        sum += term;
        size += std::abs(term);
      }
      if (!(std::abs(static_cast<double>(logits[row]) - sum) <= gamma_of(static_cast<double>(width_) + 8) * size)) return false;
    }
    return true;
  }
  // A bit that flips in page-locked memory is refused.
  Result<bool> sees_damage() {
    std::byte& byte = staging_->span()[staging_->span().size() / 3];
    byte ^= std::byte{0x20};
    const auto refused = step();
    byte ^= std::byte{0x20};
    if (refused.ok()) return false;
    if (refused.error().code() != Code::kCorrupt) return refused.error();
    PARAMWIRE_TRY(logits, step());
    return right(logits);
  }

  static constexpr Token kToken = 5;

  Bench& bench_;
  const std::uint64_t width_, piece_rows_, rows_;
  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Session> session_;
  std::vector<PieceLayout> pieces_;
  std::vector<std::vector<ExtentCheck>> checks_;
  CaseBuffer table_;
  DeviceMemory target_;
};

}  // namespace

Status bench_host_to_device(Bench& bench) { return Pipeline(bench).run(); }

}  // namespace paramwire::gpu
