// GET, DATA and STATUS from anywhere: what is read is what its encoder writes, and a MAC or CRC that was not made with the key or for the
// question is refused.
#include "fuzz.hpp"

#include "paramwire/wire/datagram.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paramwire::fuzz {
namespace {

constexpr SipKey kKey{0x0706050403020100U, 0x0f0e0d0c0b0a0908U};

void get(std::span<const std::byte> input) {
  if (!get_session(input)) return;
  DatagramGet read;
  if (decode_get(input, read) != nullptr) return;
  std::vector<std::byte> again;
  read.encode(again, kKey);
  require(again.size() == input.size(), "a GET has one length");
  require(std::equal(again.begin(), again.end() - kMacBytes, input.begin()), "a GET has one form");
  require(get_authentic(again, kKey), "its own MAC is right");
  require(get_authentic(input, kKey) == std::ranges::equal(again, input), "no other MAC is right");
}

void data(std::span<const std::byte> input) {
  const auto read = read_data(input);
  if (!read) return;
  require(read->payload_size == input.size() - kDataHeaderBytes, "a DATA says its size");
  Asked asked;
  asked.incarnation = {1, 2};
  asked.block = BlockId{3};
  asked.version = {4, 5};
  const AskedCrc crc(asked);
  std::vector<std::byte> again(kDataHeaderBytes);
  encode_data_header(again.data(), *read, crc);
  require(data_header_intact(again, crc), "its own CRC is right");
  require(data_header_intact(input, crc) == std::equal(again.begin(), again.end(), input.begin()), "no other header is");
}

void status(std::span<const std::byte> input) {
  bool forged = false;
  if (const auto read = read_status(input, kKey, forged)) {
    const auto again = read->encode(kKey);
    require(std::ranges::equal(again, input), "a STATUS has one form");
  }
}

}  // namespace

void run(std::span<const std::byte> input) {
  get(input);
  data(input);
  status(input);
}

}  // namespace paramwire::fuzz
