#include "paramwire/net/transports.hpp"

#include "paramwire/base/probe.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/udp_socket.hpp"

#include <cstddef>

namespace paramwire {

namespace {

Availability tcp_availability() {
  // A fresh network namespace has it down.
  if (const std::string down = loopback_down(); !down.empty()) {
    return {"tcp", false, cat("interface ", down, " is down in this network namespace"), cat("ip link set ", down, " up")};
  }
  const auto listener = Listener::open(Endpoint::tcp("127.0.0.1", 0));
  if (!listener.ok()) return {"tcp", false, listener.error().message()};
  return {"tcp", true, "anywhere that the server listens"};
}

Availability udp_availability() {
  const auto socket = DatagramSocket::bind(DatagramAddress::loopback(0), {});
  if (!socket.ok()) return {"udp", false, socket.error().message()};
  return {"udp", true, "at the tcp addresses of a server, where datagrams get through"};
}

// The package that has rdma_rxe where the running kernel's own files lack it. Sources: packages.debian.org (cloud kernels of Debian
// leave InfiniBand out), packages.ubuntu.com, Fedora's and RHEL's kernel.spec.
std::string rxe_package(const VerbsFacts& facts) {
  if (facts.distribution == "debian") return "apt-get install linux-image-amd64  # then boot it, not a -cloud kernel";
  if (facts.distribution == "ubuntu") return cat("apt-get install linux-modules-extra-", facts.kernel);
  if (facts.distribution == "fedora" || facts.distribution == "rhel" || facts.distribution == "centos" || facts.distribution == "rocky" ||
      facts.distribution == "almalinux") {
    return cat("dnf install kernel-modules-extra-", facts.kernel);
  }
  return "boot a kernel that has CONFIG_RDMA_RXE";
}

}  // namespace

VerbsFacts look_for_verbs(const std::string& root, const std::string& kernel) {
  VerbsFacts out;
  out.kernel = kernel;
  out.distribution = distribution(root);
  out.devices = names_in(root + "/sys/class/infiniband");
  const std::string modules = cat(root, "/lib/modules/", kernel);
  out.modules_on_disk = exists(modules);
  out.rxe_loaded = exists(root + "/sys/module/rdma_rxe") || file_mentions(modules + "/modules.builtin", "/rdma_rxe.ko");
  out.rxe_on_disk = file_mentions(modules + "/modules.dep", "/rdma_rxe.ko");
  out.library_problem = library_problem("libibverbs.so.1");
  for (const std::string& name : names_in(root + "/sys/class/net")) {
    const std::string state = first_line(cat(root, "/sys/class/net/", name, "/operstate"));
    if (name == "lo" || state == "down") continue;
    if (out.interface.empty() || state == "up") out.interface = name;
    if (state == "up") break;
  }
  return out;
}

Availability verbs_availability(const VerbsFacts& facts) {
  Availability out{"verbs", false, "not in this build"};
  std::vector<std::string> steps;
  if (!facts.library_problem.empty()) {
    out.reason += "; no library libibverbs.so.1";
    if (facts.distribution == "debian" || facts.distribution == "ubuntu") steps.emplace_back("apt-get install libibverbs1 ibverbs-providers rdma-core");
  }
  if (!facts.devices.empty()) {
    out.reason += cat("; RDMA device ", facts.devices.front(), " is there");
  } else {
    out.reason += "; no RDMA device (/sys/class/infiniband)";
    if (!facts.rxe_loaded) {
      const char* lack = facts.rxe_on_disk ? " has not loaded" : facts.modules_on_disk ? " comes without" : " has no files in /lib/modules, so no";
      out.reason += cat("; kernel ", facts.kernel, lack, " module rdma_rxe");
      if (!facts.rxe_on_disk) steps.push_back(rxe_package(facts));
      steps.emplace_back("modprobe rdma_rxe");
    }
    if (!facts.interface.empty()) steps.push_back(cat("rdma link add rxe0 type rxe netdev ", facts.interface));
  }
  for (std::size_t i = 0; i < steps.size(); ++i) out.next += cat(i == 0 ? "" : "\n", steps[i]);
  return out;
}

std::vector<Availability> available_transports() {
  return {udp_availability(), tcp_availability(), verbs_availability(look_for_verbs("", kernel_release()))};
}

}  // namespace paramwire
