// Verbs of devices that can be asked and not used, broken ones among them: for what reads tables and moves no byte.
#pragma once

#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// One device. `*_error`: errno of the call, 0 for none.
struct TableDevice {
  int open_error = 0;
  int query_error = 0;
  int port_error = 0;
  int gids_error = 0;
  int pd_error = 0;
  int register_error = 0;
  std::uint8_t ports = 1;
  std::uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  ibv_port_state state = IBV_PORT_ACTIVE;
  int gid_room = 8;
  ibv_device device{};
  std::vector<ibv_gid_entry> gids;
  ibv_context context{};
};

// Everything that it opens is counted, so that a test sees what was left open.
class TableVerbs final : public VerbsApi {
 public:
  std::map<std::string, TableDevice> devices;
  int list_error = 0;
  int open_count = 0;
  std::size_t registered_max = 0;

  TableDevice& add(const std::string& name) {
    TableDevice& out = devices[name];
    out.device.transport_type = IBV_TRANSPORT_IB;
    out.context.device = &out.device;
    return out;
  }

  Result<std::vector<std::string>> device_names() override {
    if (list_error != 0) return errno_error(Code::kUnavailable, "ibv_get_device_list", list_error);
    std::vector<std::string> out;
    for (const auto& [name, device] : devices) out.push_back(name);
    return out;
  }
  ibv_context* open_device(const std::string& name) override {
    TableDevice& device = devices.at(name);
    if (device.open_error != 0) {
      errno = device.open_error;
      return nullptr;
    }
    ++open_count;
    return &device.context;
  }
  int close_device(ibv_context*) override {
    --open_count;
    return 0;
  }
  int query_device(ibv_context* context, ibv_device_attr* out) override {
    const TableDevice& device = of(context);
    out->phys_port_cnt = device.ports;
    out->max_qp_rd_atom = 128;
    out->max_qp_init_rd_atom = 16;
    out->vendor_id = 0xffffff;
    return device.query_error;
  }
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* out) override {
    const TableDevice& device = of(context);
    if (device.port_error != 0 && port == 1) return device.port_error;
    out->state = device.state;
    out->max_mtu = IBV_MTU_4096;
    out->active_mtu = IBV_MTU_1024;
    out->gid_tbl_len = device.gid_room;
    out->max_msg_sz = 1U << 31;
    out->lid = 17;
    out->link_layer = device.link_layer;
    return 0;
  }
  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t count_max) override {
    const TableDevice& device = of(context);
    if (device.gids_error != 0) return -device.gids_error;
    if (device.gids.size() > count_max) return -EINVAL;
    std::copy(device.gids.begin(), device.gids.end(), entries);
    return static_cast<ssize_t>(device.gids.size());
  }
  ibv_pd* alloc_pd(ibv_context* context) override {
    if (of(context).pd_error == 0) {
      pd_.context = context;
      ++open_count;
      return &pd_;
    }
    errno = of(context).pd_error;
    return nullptr;
  }
  int dealloc_pd(ibv_pd*) override {
    --open_count;
    return 0;
  }
  ibv_mr* reg_mr(ibv_pd* pd, void* begin, std::size_t size, int) override {
    if (of(pd->context).register_error != 0) {
      errno = of(pd->context).register_error;
      return nullptr;
    }
    std::memset(begin, 1, size);  // as the device may
    registered_max = std::max(registered_max, size);
    ++open_count;
    return &mr_;
  }
  int dereg_mr(ibv_mr*) override {
    --open_count;
    return 0;
  }

  ibv_comp_channel* create_comp_channel(ibv_context*) override { return nullptr; }
  int destroy_comp_channel(ibv_comp_channel*) override { return ENOSYS; }
  ibv_cq* create_cq(ibv_context*, int, ibv_comp_channel*) override { return nullptr; }
  int destroy_cq(ibv_cq*) override { return ENOSYS; }
  int req_notify_cq(ibv_cq*) override { return ENOSYS; }
  int take_cq_event(ibv_comp_channel*) override { return ENOSYS; }
  int poll_cq(ibv_cq*, int, ibv_wc*) override { return -1; }
  ibv_qp* create_qp(ibv_pd*, ibv_qp_init_attr*) override { return nullptr; }
  int modify_qp(ibv_qp*, ibv_qp_attr*, int) override { return ENOSYS; }
  int destroy_qp(ibv_qp*) override { return ENOSYS; }
  int post_send(ibv_qp*, ibv_send_wr*, ibv_send_wr**) override { return ENOSYS; }

 private:
  const TableDevice& of(const ibv_context* context) const {
    for (const auto& [name, device] : devices) {
      if (&device.context == context) return device;
    }
    ADD_FAILURE() << "a context of no device";
    return devices.begin()->second;
  }

  ibv_pd pd_{};
  ibv_mr mr_{};
};

inline ibv_gid_entry table_gid(std::uint32_t index, std::string_view address, std::uint32_t type, std::uint32_t interface, std::uint32_t port = 1) {
  ibv_gid_entry out{};
  const Gid bytes = parse_gid(address).value();
  std::memcpy(out.gid.raw, bytes.data(), bytes.size());
  out.gid_index = index;
  out.port_num = port;
  out.gid_type = type;
  out.ndev_ifindex = interface;
  return out;
}

}  // namespace paramwire
