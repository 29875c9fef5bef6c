// The objects of the fake fabric: what the library's structs are to a driver. Private to fake_verbs*.cpp.
#pragma once

#include "support/fake_verbs.hpp"

#include "paramwire/base/text.hpp"

#include <cstring>

namespace paramwire::testing {

struct FakeVerbs::Device {
  FakeDevice config;
  FakeLive live;
  ibv_device handle{};
};

struct FakeVerbs::Context : ibv_context {
  Context() : ibv_context{} {}
  Device* owner = nullptr;
  int objects = 0;  // made on it and alive
};

struct FakeVerbs::Pd : ibv_pd {
  Pd() : ibv_pd{} {}
  Context* owner = nullptr;
  int users = 0;
};

struct FakeVerbs::Mr : ibv_mr {
  Mr() : ibv_mr{} {}
  Pd* owner = nullptr;
  int access = 0;
  bool revoked = false;  // its process was killed
  std::uint64_t locked_bytes = 0;
};

struct FakeVerbs::Channel : ibv_comp_channel {
  Channel() : ibv_comp_channel{} {}
  Context* owner = nullptr;
};

struct FakeVerbs::Cq : ibv_cq {
  struct Entry {
    ibv_wc wc{};
    Qp* qp = nullptr;
    std::uint64_t sequence = 0;  // of the work request
  };
  Cq() : ibv_cq{} {}
  Context* owner = nullptr;
  std::vector<Entry> ring;
  std::size_t first = 0, count = 0;
  bool armed = false;
  int users = 0;
};

struct FakeVerbs::WorkRequest {
  std::uint64_t id = 0;
  std::uint64_t remote_address = 0;
  std::uint64_t size = 0;
  std::uint32_t rkey = 0;
  std::uint32_t sge_count = 0;
  bool signalled = false, fenced = false;
  bool numbered = false;  // counted among the READs, its fault drawn
  std::uint64_t number = 0;
  FakeReadFault fault;
  // once it started
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint64_t bytes_moved = 0;
  std::uint64_t lines_left = 0;
  const Mr* remote = nullptr;
  Qp* responder = nullptr;
  bool breaks_responder = false;
};

struct FakeVerbs::Qp : ibv_qp {
  Qp() : ibv_qp{} {}
  Context* owner = nullptr;
  Pd* domain = nullptr;
  Cq* send = nullptr;
  Cq* receive = nullptr;
  bool signal_all = false;
  bool orphaned = false;  // its process was killed
  bool pumped = false;    // a thread carries out its READs; it must not be destroyed
  bool stalled = false;   // its next READ waits for an answer
  std::uint32_t sges_max = 0;

  // attributes
  std::uint8_t port = 0;
  unsigned access = 0;
  std::uint32_t mtu = 0;  // bytes
  std::uint32_t peer = 0;
  std::uint32_t receive_sequence = 0, send_sequence = 0;  // packet sequence numbers, 24 bits
  std::uint8_t reads_as_responder = 0, reads_as_requester = 0;
  bool global = false;
  Gid source{}, target{};
  GidType gid_type = GidType::kRoceV2;
  std::uint16_t target_lid = 0;

  // Send queue. Sequence numbers of work requests: freed <= completed <= started <= posted; slot = number % size of the ring.
  std::vector<WorkRequest> ring;
  std::vector<ibv_sge> sges;  // sges_max of each slot
  std::uint64_t posted = 0, started = 0, completed = 0, freed = 0;

  Device& device() const { return *owner->owner; }
  WorkRequest& at(std::uint64_t sequence) { return ring[sequence % ring.size()]; }
  const ibv_sge* sges_of(const WorkRequest& wr) const { return sges.data() + static_cast<std::size_t>(&wr - ring.data()) * sges_max; }
};

// A piece of one cache line of remote memory on its way.
struct FakeVerbs::Line {
  const std::byte* source;
  std::byte* target;
  Qp* qp;
  std::uint32_t slot;
  std::uint32_t size;
};

inline constexpr std::uint32_t kKeyFirst = 0x800;  // so that small numbers are no keys

inline Gid gid_of(const ibv_gid& raw) {
  Gid gid{};
  std::memcpy(gid.data(), raw.raw, gid.size());
  return gid;
}

// The port of a GID, or of a LID.
inline const FakePort* port_of(const FakeDevice& device, std::uint32_t number) {
  return number >= 1 && number <= device.ports.size() ? &device.ports[number - 1] : nullptr;
}

template <typename T>
T* FakeVerbs::own(const Shelf<T>& shelf, const void* object, const char* what) {
  const auto found = shelf.find(object);
  if (found != shelf.end()) return found->second.get();
  breach(cat("a ", what, " is used that was never made, or is destroyed already"));
  return nullptr;
}

}  // namespace paramwire::testing
