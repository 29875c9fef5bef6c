#include "paramwire/compute/cuda_sets.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire {

using cuda::Current;

namespace {
// Views whose copies may be on their way: one is copied while the next arrives.
constexpr std::size_t kInFlight = 2;
}  // namespace

Status CudaSets::open(const SessionOptions& options, std::shared_ptr<const cuda::Module> module, const cuda::Stream& stream) {
  const std::uint32_t count = options.resident_sets;
  if (count < 1 || count > 2) return Error(Code::kInvalid, cat("cuda session: resident_sets is ", count, ", expected 1 or 2"));
  count_ = count;
  for (auto& there : there_) there.assign(walk_.pieces.size(), false);
  PARAMWIRE_TRY(memory, cuda::DeviceMemory::allocate(device_, count * walk_.resident_bytes, count == 2 ? "weights that stay, twice" : "weights that stay"));
  memory_ = std::move(memory);
  PARAMWIRE_TRY(numbers, cuda::DeviceMemory::allocate(device_, count * kCudaAlignment, "the weights' generations"));
  numbers_ = std::move(numbers);
  PARAMWIRE_TRY(numbers_host, cuda::HostMemory::allocate(device_, count * kCudaAlignment));
  numbers_host_ = std::move(numbers_host);
  PARAMWIRE_CHECK(stream.fill(numbers_.address(), std::byte{0}, numbers_.size()));
  if (count == 1) return {};
  PARAMWIRE_TRY(own, cuda::Stream::create(device_));
  stream_ = std::move(own);
  PARAMWIRE_TRY(copied, cuda::Event::create(device_));
  copied_ = std::move(copied);
  PARAMWIRE_CHECK(planes_.open(device_, module, options.planes_bytes, kInFlight));
  return checks_.open(device_, std::move(module), walk_, kInFlight);
}

CudaSets::~CudaSets() {
  const Current current(*device_);
  // For what was enqueued: it reads host memory that goes. What failed is of no interest any more.
  if (current.status().ok() && stream_.handle() != nullptr) static_cast<void>(stream_.synchronize());
}

Status CudaSets::renew(std::span<const std::size_t> pieces) {
  for (const std::size_t piece : pieces) {
    if (piece >= walk_.pieces.size() || !walk_.pieces[piece].layout.resident) {
      return Error(Code::kInvalid, cat("renew of piece ", piece, ": expected one that stays, of ", walk_.pieces.size()));
    }
  }
  for (const std::size_t piece : pieces) there_[current_][piece] = false;
  ++generation_;
  return {};
}

Status CudaSets::write(unsigned set, std::uint32_t generation, const cuda::Stream& stream) {
  // Nobody copies from there now: the last copy of a set's number was waited for, by the end of its step or by staged().
  const auto at = numbers_host_.span().subspan(set * kCudaAlignment, sizeof generation);
  std::memcpy(at.data(), &generation, sizeof generation);
  return stream.to_device(numbers_.address() + set * kCudaAlignment, at);
}

Status CudaSets::write_number(const cuda::Stream& stream) {
  if (written_ == generation_) return {};
  PARAMWIRE_CHECK(write(current_, generation_, stream));
  written_ = generation_;
  return {};
}

Status CudaSets::begin(std::size_t piece, std::string_view what) {
  if (count_ == 1) return Error(Code::kInvalid, cat(what, ": this session has one set of weights; open it with resident_sets = 2"));
  if (piece >= walk_.pieces.size() || !walk_.pieces[piece].layout.resident) {
    return Error(Code::kInvalid, cat(what, " of piece ", piece, ": expected one that stays, of ", walk_.pieces.size()));
  }
  whole_ = false;
  there_[other()][piece] = false;
  if (filling_) return {};
  PARAMWIRE_CHECK(stream_.fill(numbers_.address() + other() * kCudaAlignment, std::byte{0}, sizeof(std::uint32_t)));
  PARAMWIRE_CHECK(checks_.begin(stream_));
  filling_ = true;
  return {};
}

Status CudaSets::stage(std::size_t piece, const WeightView& view) {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(begin(piece, "stage"));
  const PieceLayout& layout = walk_.pieces[piece].layout;
  PARAMWIRE_CHECK(check_view(binding_, {.need = layout.need, .next_row = layout.row_begin, .rows = {}}, view));
  if (view.row_end != layout.row_end) {
    return Error(Code::kInvalid, cat("stage for tensor '", view.tensor, "': given rows [", view.row_begin, ", ", view.row_end, "), expected the piece to ", layout.row_end));
  }
  if (turn_ > 0) PARAMWIRE_CHECK(copied_.synchronize());
  PARAMWIRE_CHECK(planes_.copy(stream_, view, place(other(), piece), turn_));
  PARAMWIRE_CHECK(checks_.enqueue(stream_, view, place(other(), piece), piece, turn_++));
  PARAMWIRE_CHECK(stream_.record(copied_));
  there_[other()][piece] = true;
  return {};
}

Status CudaSets::stage_same(std::size_t piece) {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(begin(piece, "stage_same"));
  PARAMWIRE_CHECK(stream_.copy(place(other(), piece), place(current_, piece), walk_.pieces[piece].bytes));
  there_[other()][piece] = true;
  return {};
}

Status CudaSets::staged() {
  if (count_ == 1) return Error(Code::kInvalid, "staged: this session has one set of weights; open it with resident_sets = 2");
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  for (std::size_t piece = 0; piece < walk_.pieces.size(); ++piece) {
    const PieceLayout& layout = walk_.pieces[piece].layout;
    if (!layout.resident || there_[other()][piece]) continue;
    return Error(Code::kInvalid, cat("staged: rows ", layout.row_begin, " to ", layout.row_end, " of tensor '", binding_.needs()[layout.need].tensor, "' have not been staged"));
  }
  if (filling_) PARAMWIRE_CHECK(checks_.read(stream_));
  PARAMWIRE_CHECK(stream_.synchronize());
  if (filling_) {
    Status verdict = checks_.verdict(binding_, walk_, "the staged weights");
    if (!verdict.ok()) {
      checks_.for_each_piece([&](std::size_t piece) { there_[other()][piece] = false; });
      filling_ = false;  // what comes next is compared anew
      return verdict;
    }
  }
  PARAMWIRE_CHECK(write(other(), generation_ + 1, stream_));
  PARAMWIRE_CHECK(stream_.synchronize());
  filling_ = false;
  whole_ = true;
  return {};
}

Status CudaSets::swap() {
  if (!whole_) return Error(Code::kInvalid, "swap: the other set of weights has not been staged whole; see staged()");
  current_ = other();
  written_ = ++generation_;
  whole_ = false;
  return {};
}

}  // namespace paramwire
