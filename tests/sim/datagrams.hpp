// The datagram network of a simulated cluster: loses, delays, reorders, repeats and damages; is cut for a while; and has somebody in it who
// sees everything, sends what he likes under any address, and knows no key.
#pragma once

#include "sim/world.hpp"

#include <array>
#include <map>

namespace paramwire::sim {

// Addresses: a client's number and life; victims of spoofing from kVictim up.
inline constexpr std::uint32_t kVictim = 0x8000'0000U;
std::array<std::byte, 18> address_bytes(std::uint32_t address);

class DatagramNet {
 public:
  explicit DatagramNet(World& world);
  void start();
  // `forged`: nobody with a key made these bytes.
  void to_server(std::uint32_t sender, Bytes bytes, bool forged = false);
  void to_client(std::uint32_t address, Bytes bytes);
  // The sender of a datagram that the server reads now.
  void arrived(std::uint32_t sender, std::size_t size);

 private:
  Micros delay();
  bool lost();
  void spoof();
  void forge_for_server();
  void forge_for_client();

  World& world_;
  std::uint32_t loss_ = 0, repeat_ = 0, reorder_ = 0;  // per cent
  Micros cut_until_ = 0;
  bool spoofing_ = false;
  struct Seen {
    std::uint32_t sender = 0;
    Bytes bytes;
  };
  std::vector<Seen> gets_;                              // the latest few
  std::map<std::uint32_t, std::uint64_t> from_, towards_;  // bytes, of victims
};

}  // namespace paramwire::sim
