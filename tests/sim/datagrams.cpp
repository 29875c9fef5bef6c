#include "sim/datagrams.hpp"

#include "sim/client.hpp"
#include "sim/server.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/wire/datagram.hpp"

#include <algorithm>

namespace paramwire::sim {

namespace {
constexpr std::size_t kSeenMax = 40;
}  // namespace

std::array<std::byte, 18> address_bytes(std::uint32_t address) {
  std::array<std::byte, 18> out{};
  store_le<std::uint32_t>(out.data() + 12, address);
  return out;
}

DatagramNet::DatagramNet(World& world) : world_(world) {
  if (!world_.profile().datagrams) return;
  Random& random = world_.random();
  loss_ = random.chance(40) ? static_cast<std::uint32_t>(random.below(25)) : 0;
  repeat_ = random.chance(40) ? static_cast<std::uint32_t>(random.below(10)) : 0;
  reorder_ = random.chance(40) ? static_cast<std::uint32_t>(random.below(40)) : 0;
  spoofing_ = random.chance(60);
}

void DatagramNet::start() {
  if (spoofing_) spoof();
}

Micros DatagramNet::delay() {
  Random& random = world_.random();
  return static_cast<Micros>(random.chance(reorder_) ? random.below(1500) : 15 + random.below(20));
}

bool DatagramNet::lost() {
  Random& random = world_.random();
  if (world_.now() < cut_until_) return true;
  if (random.below(4000) == 0) {
    cut_until_ = world_.now() + static_cast<Micros>(random.below(8000));
    world_.coverage().faults["datagrams: cut off for a while"]++;
  }
  const bool gone = random.chance(loss_);
  if (gone) world_.coverage().faults["datagrams: lost"]++;
  return gone;
}

void DatagramNet::to_server(std::uint32_t sender, Bytes bytes, bool forged) {
  Random& random = world_.random();
  if (!forged && sender < kVictim) {
    gets_.push_back({sender, bytes});
    if (gets_.size() > kSeenMax) gets_.erase(gets_.begin());
  }
  if (lost()) return;
  if (world_.corrupting() && !bytes.empty() && random.below(200) == 0) {
    bytes[random.below(bytes.size())] ^= std::byte{1} << static_cast<int>(random.below(8));
    forged = true;
    world_.coverage().faults["datagrams: bit flipped"]++;
  }
  const int copies = random.chance(repeat_) ? 2 : 1;
  if (copies == 2) world_.coverage().faults["datagrams: repeated"]++;
  for (int i = 0; i < copies; ++i) {
    world_.after(delay(), Lane::kPassive, [this, sender, bytes, forged] {
      if (SimServer* server = world_.server(); server != nullptr) server->datagram(sender, bytes, forged);
    });
  }
}

void DatagramNet::arrived(std::uint32_t sender, std::size_t size) {
  if (sender >= kVictim) from_[sender] += size;
}

void DatagramNet::to_client(std::uint32_t address, Bytes bytes) {
  Random& random = world_.random();
  if (address >= kVictim) {
    towards_[address] += bytes.size();
    if (towards_[address] > 3 * from_[address]) {
      world_.fail(cat("spoofing: ", towards_[address], " bytes went to an address that ", from_[address], " seemed to come from"));
    }
    return;
  }
  if (lost()) return;
  const bool data = datagram_kind(bytes) == DatagramKind::kData;
  if (data && world_.profile().flipped_headers && random.below(30) == 0) {
    // Not in the CRC itself: with the check out that would go unseen, and rightly.
    bytes[random.below(20)] ^= std::byte{1} << static_cast<int>(random.below(8));
    world_.coverage().faults["datagrams: bit flipped"]++;
  } else if (world_.corrupting() && random.below(200) == 0) {
    bytes[random.below(bytes.size())] ^= std::byte{1} << static_cast<int>(random.below(8));
    world_.coverage().faults["datagrams: bit flipped"]++;
  }
  const int copies = random.chance(repeat_) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    world_.after(delay(), Lane::kClient, [this, address, bytes] {
      for (SimClient* client : world_.clients()) client->datagram(address, bytes);
    });
  }
}

// ---------------------------------------------------------------- who knows no key

void DatagramNet::spoof() {
  if (world_.stopping()) return;
  world_.after(static_cast<Micros>(20 + world_.random().below(600)), Lane::kPassive, [this] { spoof(); });
  if (gets_.empty()) return;
  world_.coverage().faults["datagrams: forged"]++;
  if (world_.random().chance(70)) {
    forge_for_server();
  } else {
    forge_for_client();
  }
}

void DatagramNet::forge_for_server() {
  Random& random = world_.random();
  const Seen& seen = gets_[static_cast<std::size_t>(random.below(gets_.size()))];
  const std::uint32_t victim = kVictim + static_cast<std::uint32_t>(random.below(5));
  switch (random.below(4)) {
    case 0: {  // somebody else's question, under another address
      const Seen& latest = gets_.back();
      return to_server(victim, latest.bytes);
    }
    case 1: {  // again, as it was
      const Bytes bytes = seen.bytes;
      return world_.after(delay(), Lane::kPassive, [this, sender = seen.sender, bytes] {
        if (SimServer* server = world_.server(); server != nullptr) server->datagram(sender, bytes, false);
      });
    }
    case 2: {  // changed where it hurts: the next sequence numbers, another request
      Bytes bytes = seen.bytes;
      store_le<std::uint64_t>(bytes.data() + 16, load_le<std::uint64_t>(bytes.data() + 16) + 1 + random.below(2000));
      store_le<std::uint64_t>(bytes.data() + 24, random.next());
      return to_server(random.chance(50) ? seen.sender : victim, std::move(bytes), true);
    }
    default: {
      Bytes bytes(static_cast<std::size_t>(random.below(300)));
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
      if (bytes.size() >= 6 && random.chance(50)) std::copy_n(seen.bytes.begin(), 6, bytes.begin());
      return to_server(victim, std::move(bytes), true);
    }
  }
}

// He sees requests, so he need not guess them; but a STATUS needs the key, and for DATA he would have to be on the path, which no CRC is
// against: DATA is forged with numbers that he made up.
void DatagramNet::forge_for_client() {
  Random& random = world_.random();
  const Seen& seen = gets_.back();
  DatagramGet get;
  if (decode_get(seen.bytes, get) != nullptr) return;
  Bytes bytes;
  if (random.chance(70)) {
    constexpr StatusCode kCodes[] = {StatusCode::kToken, StatusCode::kInvalid, StatusCode::kStale, StatusCode::kStale, StatusCode::kBackpressure};
    const auto status = DatagramStatus{kCodes[random.below(5)], get.request, 1000, {random.next(), random.next()}}.encode(SipKey{random.next(), random.next()});
    bytes.assign(status.begin(), status.end());
  } else {
    bytes.resize(kDataHeaderBytes + get.segment_size);
    encode_data_header(bytes.data(), {get.segment_size, random.next(), get.first_segment}, AskedCrc(get.asked));
  }
  world_.after(delay(), Lane::kClient, [this, to = seen.sender, bytes] {
    for (SimClient* client : world_.clients()) client->datagram(to, bytes);
  });
}

}  // namespace paramwire::sim
