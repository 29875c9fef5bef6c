// Reads a tensor's shape and shard from text-like input, and checks its bytes: errors are values, nothing throws.
#include "paramwire/base/crc.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <array>
#include <cstdint>
#include <iostream>
#include <span>
#include <vector>

namespace {

// Bytes of rows [64, 128) of a bf16 matrix with 1024 rows, and the block id that a fetch would ask for.
paramwire::Status describe() {
  const std::array<std::uint64_t, 2> dims = {1024, 576};
  PARAMWIRE_TRY(shape, paramwire::Shape::from(dims));
  PARAMWIRE_TRY(dtype, paramwire::dtype_from_name("BF16"));
  const auto shard = paramwire::Shard::rows(64, 128);
  PARAMWIRE_TRY(part, paramwire::shard_shape(shape, shard));
  const std::vector<std::byte> bytes(paramwire::tensor_bytes(dtype, part));
  std::cout << "block " << paramwire::block_id("model.layers.0.mlp.up_proj", shard).to_string() << ": " << part.to_string() << ", "
            << bytes.size() << " bytes, CRC-64 " << std::hex << paramwire::crc64(bytes) << std::dec << "\n";

  // Outside the tensor: the error says what was asked, and what there is.
  const auto outside = paramwire::shard_rows(shape, paramwire::Shard::rows(1024, 1025));
  if (outside.ok()) return paramwire::Error(paramwire::Code::kInternal, "rows past the end were accepted");
  std::cout << "refused as it should be: " << outside.error().to_string() << "\n";
  return {};
}

}  // namespace

int main() {
  const auto status = describe();
  if (!status.ok()) {
    std::cerr << status.error().to_string() << "\n";
    return 1;
  }
  return 0;
}
