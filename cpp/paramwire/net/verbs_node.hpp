// The RDMA side of one client: its devices, and the buffers of its caller that reads may go straight into. Shared by the client's verbs links.
//
// A buffer is registered once, by its owner, for as long as it lives (BufferRegistration); nothing is registered behind anybody's back, since
// memory that was freed and handed out again under an old registration would take another's bytes. What is not registered is reached through
// a link's own staging buffer, with one copy that the check of the bytes makes anyway. Any thread.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/verbs_device.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

class VerbsApi;

class VerbsNode {
 public:
  // `open`: VerbsLibrary::open, or a test's provider; called when first needed, until it succeeds.
  VerbsNode(VerbsWish wish, std::function<Result<std::shared_ptr<VerbsApi>>()> open) : wish_(std::move(wish)), open_(std::move(open)) {}

  // Ways to reach the peer, best first, from tables read now: addresses and ports come and go. errors: as rank_choices and VerbsLibrary::open.
  Result<std::vector<VerbsChoice>> choices(const VerbsPeer& peer);
  // Opened once while somebody keeps it. errors: as VerbsDevice::open.
  Result<std::shared_ptr<VerbsDevice>> device(const std::string& name);
  // `device` fails what should work: it was reset, or taken out and put back, and is opened anew from now on. Buffers keep their registrations at it,
  // and it, as long as they live.
  void forget(const std::shared_ptr<VerbsDevice>& device) noexcept;

  // Registers `buffer` on the devices that are open now, and on others when a link first reads into it. The same memory may be added again.
  // errors: kInvalid for an empty buffer; as VerbsMemory::create.
  Result<std::uint64_t> add(std::span<std::byte> buffer);
  void remove(std::uint64_t id) noexcept;
  // What keeps `target` registered on the device: nullptr when no added buffer holds all of it, or it could not be registered there.
  std::shared_ptr<const VerbsMemory> find(const std::shared_ptr<VerbsDevice>& device, std::span<const std::byte> target);

 private:
  struct Registered {
    std::span<std::byte> bytes;
    // By device; nullptr: it was refused there.
    std::vector<std::pair<std::weak_ptr<VerbsDevice>, std::shared_ptr<const VerbsMemory>>> memories;
  };
  Result<std::shared_ptr<const VerbsMemory>> memory_of(Registered& buffer, const std::shared_ptr<VerbsDevice>& device);

  const VerbsWish wish_;
  const std::function<Result<std::shared_ptr<VerbsApi>>()> open_;
  std::mutex mutex_;
  std::shared_ptr<VerbsApi> api_;
  std::map<std::string, std::weak_ptr<VerbsDevice>> devices_;
  std::map<std::uint64_t, Registered> buffers_;  // by id: few, large ones
  std::uint64_t last_id_ = 0;
};

}  // namespace paramwire
