#include "paramwire/compute/cuda_checks.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace paramwire {

Status CudaChecks::open(const cuda::DevicePtr& device, std::shared_ptr<const cuda::Module> module, const CudaWalk& walk, std::size_t in_flight) {
  module_ = std::move(module);
  in_flight_ = in_flight;
  label_ = device->label();
  for (const CudaPiece& piece : walk.pieces) extents_max_ = std::max(extents_max_, piece.bytes / kExtentBytes + 1);
  PARAMWIRE_TRY(expected, cuda::DeviceMemory::allocate(device, in_flight * 4 * extents_max_, "expected checksums"));
  expected_ = std::move(expected);
  PARAMWIRE_TRY(verdict, cuda::DeviceMemory::allocate(device, sizeof(cuda::Verdict), "the checks' verdict"));
  verdict_ = std::move(verdict);
  PARAMWIRE_TRY(expected_host, cuda::HostMemory::allocate(device, expected_.size()));
  expected_host_ = std::move(expected_host);
  PARAMWIRE_TRY(verdict_host, cuda::HostMemory::allocate(device, sizeof(cuda::Verdict)));
  verdict_host_ = std::move(verdict_host);
  checked_.reserve(walk.pieces.size());
  return {};
}

Status CudaChecks::begin(const cuda::Stream& stream) {
  checked_.clear();
  extents_ = 0;
  return stream.fill(verdict_.address(), std::byte{0xff}, verdict_.size());
}

Status CudaChecks::enqueue(const cuda::Stream& stream, const WeightView& view, CUdeviceptr at, std::size_t piece, std::uint64_t turn) {
  if (view.checks.empty()) return {};
  const std::uint64_t begin = view.checks.front().offset;
  for (std::size_t i = 0; i < view.checks.size(); ++i) {
    const ExtentCheck& check = view.checks[i];
    const bool last = i + 1 == view.checks.size();
    if (check.offset != begin + i * kExtentBytes || (last ? check.size == 0 || check.size > kExtentBytes : check.size != kExtentBytes) || check.offset + check.size > view.data.size() ||
        i >= extents_max_) {
      return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': check ", i, " is of ", check.size, " bytes at ", check.offset, ", expected extents of ", kExtentBytes,
                                       " one behind the other, within ", view.data.size(), " bytes"));
    }
  }
  const std::uint64_t place = turn % in_flight_ * 4 * extents_max_, bytes = 4 * view.checks.size();
  const auto expected = expected_host_.span().subspan(static_cast<std::size_t>(place), static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < view.checks.size(); ++i) std::memcpy(expected.data() + 4 * i, &view.checks[i].crc32c, 4);
  PARAMWIRE_CHECK(stream.to_device(expected_.address() + place, expected));
  const cuda::Crc32cArgs args{.data = reinterpret_cast<const void*>(at + begin),  // NOLINT: a device address
                              .size = view.checks.back().offset + view.checks.back().size - begin,
                              .expected = expected_.at<const std::uint32_t>(place),
                              .verdict = verdict_.at<cuda::Verdict>(),
                              .extent_bytes = static_cast<std::uint32_t>(kExtentBytes),
                              .first = extents_};
  PARAMWIRE_CHECK(module_->launch(stream, cuda::Kernel::k_crc32c_extents, cuda::crc32c_extents_launch(args), args));
  checked_.push_back({extents_, piece, begin});
  extents_ += static_cast<std::uint32_t>(view.checks.size());
  return {};
}

Status CudaChecks::read(const cuda::Stream& stream) const { return stream.to_host(verdict_host_.span(), verdict_.address()); }

Status CudaChecks::verdict(const Binding& binding, const CudaWalk& walk, std::string_view weights) const {
  cuda::Verdict verdict{};
  std::memcpy(&verdict, verdict_host_.data(), sizeof verdict);
  const std::uint32_t bad = cuda::bad_count(verdict);
  if (bad == 0 || checked_.empty()) return {};
  const auto behind = std::upper_bound(checked_.begin(), checked_.end(), verdict.lowest, [](std::uint32_t lowest, const Checked& each) { return lowest < each.first; });
  const Checked& first = *(behind - 1);
  const PieceLayout& layout = walk.pieces[first.piece].layout;
  return Error(Code::kCorrupt, cat(label_, ": ", bad, " of ", extents_, " extents of ", weights, " are not what the server sealed; the first is at byte ",
                                   first.offset + (verdict.lowest - first.first) * kExtentBytes, " of rows ", layout.row_begin, " to ", layout.row_end, " of tensor '",
                                   binding.needs()[layout.need].tensor, "'. Fetch them again, from another replica if there is one"));
}

}  // namespace paramwire
