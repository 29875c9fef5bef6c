#include "support/fake_verbs_objects.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace paramwire::testing {

Gid ipv4_gid(const std::string& ipv4) {
  Gid gid{};
  gid[10] = gid[11] = 0xff;
  if (inet_pton(AF_INET, ipv4.c_str(), gid.data() + 12) != 1) std::abort();  // a test's typing error
  return gid;
}

FakeDevice FakeDevice::roce(std::string name, const std::string& ipv4) {
  const Gid address = ipv4_gid(ipv4);
  Gid link_local{};
  link_local[0] = 0xfe;
  link_local[1] = 0x80;
  std::copy(address.begin() + 12, address.end(), link_local.begin() + 12);
  FakeDevice device;
  device.name = std::move(name);
  device.ports.resize(1);
  device.ports[0].gids = {{0, link_local, GidType::kRoceV2, 1}, {1, address, GidType::kRoceV2, 1}};
  return device;
}

FakeVerbs::FakeVerbs(FakeFabric fabric) : delivery_(fabric.delivery), random_(fabric.seed) {
  for (FakeDevice& config : fabric.devices) {
    auto device = std::make_unique<Device>();
    device->config = std::move(config);
    std::snprintf(device->handle.name, sizeof device->handle.name, "%s", device->config.name.c_str());
    devices_.push_back(std::move(device));
  }
  if (delivery_ == Delivery::kThread) nic_ = std::thread([this] { run_nic(); });
}

FakeVerbs::~FakeVerbs() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (nic_.joinable()) nic_.join();
  for (const auto& [pointer, channel] : channels_) close(channel->fd);
}

// ---------------------------------------------------------------- what a test does and asks

void FakeVerbs::fail(FakeCall call, int error, std::uint64_t nth, std::uint64_t times, std::string device) {
  const Lock lock(mutex_);
  faults_.push_back({call, error, nth, times, std::move(device)});
}

void FakeVerbs::fail_no_more() {
  const Lock lock(mutex_);
  faults_.clear();
}

void FakeVerbs::fail_read(std::uint64_t nth, const FakeReadFault& fault) {
  const Lock lock(mutex_);
  read_faults_.push_back({nth, fault});
}

void FakeVerbs::change(const std::string& device, const std::function<void(FakeDevice&)>& edit) {
  Lock lock(mutex_);
  Device* const found = find(device);
  if (found == nullptr) return breach(cat("the test changes a device that is not there: ", device));
  edit(found->config);
  if (found->config.gone) {
    for (const auto& [pointer, qp] : qps_) {
      if (&qp->device() == found && (qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS)) enter_error(*qp);
    }
  }
  start_all(lock);
}

void FakeVerbs::kill_owner(const std::string& device) {
  const Lock lock(mutex_);
  for (const auto& [pointer, qp] : qps_) {
    if (qp->device().config.name == device) qp->orphaned = true;
  }
  for (const auto& [pointer, mr] : mrs_) {
    if (mr->owner->owner->owner->config.name == device) mr->revoked = true;
  }
  fail_under_way(IBV_WC_RETRY_EXC_ERR, [](const Qp&, const WorkRequest& wr) { return wr.responder != nullptr && wr.responder->orphaned; });
}

void FakeVerbs::freeze(bool frozen) {
  Lock lock(mutex_);
  frozen_ = frozen;
  start_all(lock);
}

void FakeVerbs::hold_timeouts(bool held) {
  Lock lock(mutex_);
  timeouts_held_ = held;
  start_all(lock);
}

void FakeVerbs::before_read(std::function<void(const FakeRead&)> hook) {
  const Lock lock(mutex_);
  before_read_ = std::move(hook);
}

FakeLive FakeVerbs::live(const std::string& device) const {
  const Lock lock(mutex_);
  FakeLive sum;
  for (const auto& each : devices_) {
    if (!device.empty() && each->config.name != device) continue;
    sum.contexts += each->live.contexts;
    sum.pds += each->live.pds;
    sum.regions += each->live.regions;
    sum.channels += each->live.channels;
    sum.cqs += each->live.cqs;
    sum.qps += each->live.qps;
    sum.registered_bytes += each->live.registered_bytes;
  }
  return sum;
}

FakeTotals FakeVerbs::totals() const {
  const Lock lock(mutex_);
  return totals_;
}
std::vector<FakeModify> FakeVerbs::modifies() const {
  const Lock lock(mutex_);
  return modifies_;
}
std::vector<std::string> FakeVerbs::refusals() const {
  const Lock lock(mutex_);
  return refusals_;
}
std::vector<std::string> FakeVerbs::breaches() const {
  const Lock lock(mutex_);
  return breaches_;
}

void FakeVerbs::keep(std::vector<std::string>& list, std::string text) {
  if (list.size() < kModifiesKept) list.push_back(std::move(text));
}

FakeVerbs::Device* FakeVerbs::find(const std::string& name) const {
  for (const auto& device : devices_) {
    if (device->config.name == name) return device.get();
  }
  return nullptr;
}

int FakeVerbs::injected(FakeCall call, const std::string& device) {
  for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
    if (fault->call != call || (!fault->device.empty() && fault->device != device)) continue;
    if (--fault->nth > 0) continue;
    fault->nth = 1;
    const int error = fault->error;
    if (--fault->times == 0) faults_.erase(fault);
    return error;
  }
  return 0;
}

int FakeVerbs::usable(FakeCall call, const Device& device) {
  if (device.config.gone) return EIO;
  return faults_.empty() ? 0 : injected(call, device.config.name);
}

}  // namespace paramwire::testing
