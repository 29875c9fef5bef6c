#include "paramwire/net/verbs_node.hpp"

#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_ports.hpp"

#include <algorithm>

namespace paramwire {

Result<std::vector<VerbsChoice>> VerbsNode::choices(const VerbsPeer& peer) {
  std::shared_ptr<VerbsApi> api;
  {
    const std::lock_guard lock(mutex_);
    if (api_ == nullptr) {
      PARAMWIRE_TRY(opened, open_());
      api_ = std::move(opened);
    }
    api = api_;
  }
  PARAMWIRE_TRY(ports, read_ports(*api));
  return rank_choices(ports, peer, wish_);
}

Result<std::shared_ptr<VerbsDevice>> VerbsNode::device(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (auto open = devices_[name].lock()) return open;
  if (api_ == nullptr) {
    PARAMWIRE_TRY(opened, open_());
    api_ = std::move(opened);
  }
  PARAMWIRE_TRY(device, VerbsDevice::open(api_, name));
  devices_[name] = device;
  return device;
}

void VerbsNode::forget(const std::shared_ptr<VerbsDevice>& device) noexcept {
  const std::lock_guard lock(mutex_);
  const auto known = devices_.find(device->name());
  if (known != devices_.end() && known->second.lock() == device) devices_.erase(known);
}

// ---------------------------------------------------------------- buffers

Result<std::shared_ptr<const VerbsMemory>> VerbsNode::memory_of(Registered& buffer, const std::shared_ptr<VerbsDevice>& device) {
  std::erase_if(buffer.memories, [](const auto& known) { return known.first.expired(); });
  for (const auto& [where, memory] : buffer.memories) {
    if (where.lock() == device) return memory;
  }
  auto made = VerbsMemory::create(device, buffer.bytes, VerbsMemory::Access::kLocal);
  std::shared_ptr<const VerbsMemory> memory;
  if (made.ok()) memory = std::move(*made);
  buffer.memories.emplace_back(device, memory);
  if (!made.ok()) return std::move(made).error();
  return memory;
}

Result<std::uint64_t> VerbsNode::add(std::span<std::byte> buffer) {
  if (buffer.empty()) return Error(Code::kInvalid, "a buffer of 0 bytes can't be registered");
  const std::lock_guard lock(mutex_);
  Registered registered{buffer, {}};
  for (const auto& [name, weak] : devices_) {
    if (const auto device = weak.lock()) PARAMWIRE_CHECK(memory_of(registered, device));
  }
  buffers_.emplace(++last_id_, std::move(registered));
  return last_id_;
}

void VerbsNode::remove(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  buffers_.erase(id);
}

std::shared_ptr<const VerbsMemory> VerbsNode::find(const std::shared_ptr<VerbsDevice>& device, std::span<const std::byte> target) {
  const std::lock_guard lock(mutex_);
  for (auto& [id, buffer] : buffers_) {
    const std::byte* begin = buffer.bytes.data();
    if (target.data() < begin || target.data() + target.size() > begin + buffer.bytes.size()) continue;
    if (auto memory = memory_of(buffer, device); memory.ok() && *memory != nullptr) return *memory;
  }
  return nullptr;
}

}  // namespace paramwire
