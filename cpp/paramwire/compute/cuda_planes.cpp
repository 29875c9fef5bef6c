#include "paramwire/compute/cuda_planes.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace paramwire {

Status CudaPlanes::open(const cuda::DevicePtr& device, std::shared_ptr<const cuda::Module> module, std::uint64_t piece_bytes, std::size_t in_flight) {
  module_ = std::move(module);
  piece_bytes_ = piece_bytes;
  in_flight_ = in_flight;
  if (piece_bytes == 0) return {};
  chunks_max_ = piece_bytes / kExtentBytes + 1;
  PARAMWIRE_TRY(scratch, cuda::DeviceMemory::allocate(device, piece_bytes, "planes of encoded weights"));
  scratch_ = std::move(scratch);
  PARAMWIRE_TRY(described, cuda::DeviceMemory::allocate(device, in_flight * chunks_max_ * sizeof(cuda::MergePiece), "what describes planes"));
  described_ = std::move(described);
  PARAMWIRE_TRY(described_host, cuda::HostMemory::allocate(device, described_.size()));
  described_host_ = std::move(described_host);
  return {};
}

Status CudaPlanes::check(const WeightView& view, std::uint64_t width) const {
  std::uint64_t end = 0;
  const auto wrong = [&](const PlanesApart& planes) {
    return planes.size == 0 || planes.size % width != 0 || planes.offset % width != 0 || planes.offset < end || planes.offset > view.data.size() || planes.size > view.data.size() - planes.offset;
  };
  for (const PlanesApart& planes : view.planes) {
    if (!wrong(planes)) {
      end = planes.offset + planes.size;
      continue;
    }
    return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': planes of ", planes.size, " bytes at ", planes.offset, ", expected whole elements of ", width,
                                     " bytes, behind byte ", end, " and within ", view.data.size()));
  }
  if (view.data.size() <= piece_bytes_ && view.planes.size() <= chunks_max_) return {};
  return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': ", view.planes.size(), " planes in ", view.data.size(), " bytes, and this session was opened for planes in ",
                                   piece_bytes_, " bytes at most; see SessionOptions::planes_bytes"));
}

Status CudaPlanes::copy(const cuda::Stream& stream, const WeightView& view, CUdeviceptr at, std::uint64_t turn) const {
  if (view.planes.empty()) return stream.to_device(at, view.data);
  const std::uint64_t width = dtype_bits(view.dtype) / 8;
  PARAMWIRE_CHECK(check(view, width));
  PARAMWIRE_CHECK(stream.to_device(scratch_.address(), view.data));

  const std::uint64_t place = turn % in_flight_ * chunks_max_ * sizeof(cuda::MergePiece);
  const auto described = described_host_.span().subspan(static_cast<std::size_t>(place), view.planes.size() * sizeof(cuda::MergePiece));
  std::uint32_t count_max = 0;
  std::uint64_t end = 0;  // of what has a place
  for (std::size_t i = 0; i < view.planes.size(); ++i) {
    const PlanesApart& planes = view.planes[i];
    cuda::MergePiece piece{};
    piece.count = static_cast<std::uint32_t>(planes.size / width);
    for (std::uint64_t p = 0; p < width; ++p) piece.plane[p] = scratch_.at<const std::uint8_t>(planes.offset + p * piece.count);
    piece.out = reinterpret_cast<void*>(at + planes.offset);  // NOLINT: a device address
    std::memcpy(described.data() + i * sizeof piece, &piece, sizeof piece);
    count_max = std::max(count_max, piece.count);
    PARAMWIRE_CHECK(stream.copy(at + end, scratch_.address() + end, planes.offset - end));
    end = planes.offset + planes.size;
  }
  PARAMWIRE_CHECK(stream.copy(at + end, scratch_.address() + end, view.data.size() - end));
  PARAMWIRE_CHECK(stream.to_device(described_.address() + place, described));
  const cuda::MergeArgs args{.pieces = described_.at<const cuda::MergePiece>(place),
                             .pieces_count = static_cast<std::uint32_t>(view.planes.size()),
                             .count_max = count_max,
                             .rotate = 1};
  return module_->launch(stream, width == 2 ? cuda::Kernel::k_merge_2 : cuda::Kernel::k_merge_4, cuda::merge_launch(args), args);
}

}  // namespace paramwire
