#include "paramwire/net/transports.hpp"

#include "paramwire/base/probe.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/udp_socket.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_ports.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

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

// What a client stages reads through, so less is of no use; one look costs well below a millisecond.
constexpr std::size_t kTryBytes = std::size_t{4} << 20;

bool has_apt(const VerbsFacts& facts) { return facts.distribution == "debian" || facts.distribution == "ubuntu"; }

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

struct Problems {
  std::vector<std::string> reasons;
  std::vector<std::string> steps;
};

std::string joined(const std::vector<std::string>& parts, std::string_view between) {
  std::string out;
  for (const std::string& part : parts) out += cat(out.empty() ? "" : between, part);
  return out;
}

void no_device(const VerbsFacts& facts, Problems& out) {
  out.reasons.emplace_back("no RDMA device (/sys/class/infiniband)");
  if (!facts.rxe_loaded) {
    const char* lack = facts.rxe_on_disk ? " has not loaded" : facts.modules_on_disk ? " comes without" : " has no files in /lib/modules, so no";
    out.reasons.push_back(cat("kernel ", facts.kernel, lack, " module rdma_rxe"));
    if (!facts.rxe_on_disk) out.steps.push_back(rxe_package(facts));
    out.steps.emplace_back("modprobe rdma_rxe");
  }
  if (!facts.interface.empty()) out.steps.push_back(cat("rdma link add rxe0 type rxe netdev ", facts.interface));
}

// Devices that the kernel has and the library does not list.
void no_list(const VerbsFacts& facts, Problems& out) {
  if (!facts.list_problem.empty()) out.reasons.push_back(facts.list_problem);
  if (!facts.uverbs_loaded) {
    out.reasons.emplace_back("module ib_uverbs is not loaded");
    out.steps.emplace_back("modprobe ib_uverbs");
  }
  if (!out.reasons.empty()) return;
  bool file_lacks = false;
  bool provider_lacks = false;
  for (const std::string& device : facts.devices) {
    if (std::any_of(facts.ports.begin(), facts.ports.end(), [&](const PortFacts& port) { return port.device == device; })) continue;
    const bool fileless = std::find(facts.fileless.begin(), facts.fileless.end(), device) != facts.fileless.end();
    out.reasons.push_back(fileless ? cat("device ", device, " has no file in /dev/infiniband") : cat("libibverbs lists no ", device, ", for want of its provider"));
    file_lacks = file_lacks || fileless;
    provider_lacks = provider_lacks || !fileless;
  }
  if (file_lacks) out.steps.emplace_back("--device=/dev/infiniband  # to start the container with");
  if (provider_lacks && has_apt(facts)) out.steps.emplace_back("apt-get install ibverbs-providers");
}

// Rows, of which none can be used. What is wrong with a device that can't be asked stands in its row.
void no_row(const VerbsFacts& facts, Problems& out) {
  bool asked = false;
  for (const PortFacts& port : facts.ports) {
    asked = asked || port.problem.empty();
    for (const GidRow& row : port.gids) {
      std::string step = cat("ip link set ", row.interface, " up");
      const bool told = std::find(out.steps.begin(), out.steps.end(), step) != out.steps.end();
      if (port.state == "DOWN" && !row.interface.empty() && !told) out.steps.push_back(std::move(step));
    }
  }
  if (asked && out.steps.empty()) out.steps.emplace_back("rdma link  # tells each device's interface: it must be up in this network namespace, with an address");
}

std::string usable_text(const VerbsChoice& choice) { return cat(choice.to_string(), ", MTU ", choice.mtu, choice.software ? "; software RDMA (rxe)" : ""); }

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
  const std::string uverbs = root + "/sys/class/infiniband_verbs";
  out.uverbs_loaded = exists(uverbs);
  for (const std::string& name : names_in(uverbs)) {
    const std::string device = first_line(cat(uverbs, "/", name, "/ibdev"));
    if (!device.empty() && !exists(cat(root, "/dev/infiniband/", name))) out.fileless.push_back(device);
  }
  out.library_problem = library_problem("libibverbs.so.1");
  if (out.library_problem.empty()) {
    if (const auto library = VerbsLibrary::open(); !library.ok()) out.library_unfit = library.error().message();
  }
  for (const std::string& name : names_in(root + "/sys/class/net")) {
    const std::string state = first_line(cat(root, "/sys/class/net/", name, "/operstate"));
    if (name == "lo" || state == "down") continue;
    if (out.interface.empty() || state == "up") out.interface = name;
    if (state == "up") break;
  }
  return out;
}

void look_at_devices(VerbsFacts& facts, VerbsApi& api) {
  auto ports = read_ports(api);
  if (!ports.ok()) {
    facts.list_problem = ports.error().message();
    return;
  }
  facts.ports = std::move(ports).value();
  const auto choices = rank_choices(facts.ports, {}, {});
  if (!choices.ok()) return;
  const Status registered = try_registration(api, choices->front().device, kTryBytes);
  if (!registered.ok()) facts.memory_problem = registered.error().message();
}

Availability verbs_availability(const VerbsFacts& facts) {
  Problems found;
  if (!facts.library_problem.empty()) {
    found.reasons.push_back(facts.library_problem);
    if (has_apt(facts)) found.steps.emplace_back("apt-get install libibverbs1 ibverbs-providers rdma-core");
  }
  if (!facts.library_unfit.empty()) found.reasons.push_back(facts.library_unfit);
  if (facts.devices.empty()) {
    no_device(facts, found);
  } else if (!found.reasons.empty()) {
    found.reasons.push_back(cat("RDMA device ", facts.devices.front(), " is there"));
  } else {
    no_list(facts, found);
    const auto choices = rank_choices(facts.ports, {}, {});
    if (choices.ok() && facts.memory_problem.empty()) return {"verbs", true, usable_text(choices->front())};
    if (choices.ok()) {
      found.reasons.push_back(facts.memory_problem);
      if (facts.memory_problem.find("ulimit -l") != std::string::npos) found.steps.emplace_back("ulimit -l unlimited");
    } else if (!facts.ports.empty()) {
      found.reasons.push_back(choices.error().message());
      no_row(facts, found);
    }
  }
  return {"verbs", false, joined(found.reasons, "; "), joined(found.steps, "\n")};
}

VerbsFacts verbs_here() {
  VerbsFacts out = look_for_verbs("", kernel_release());
  if (out.devices.empty()) return out;
  if (const auto library = VerbsLibrary::open(); library.ok()) look_at_devices(out, **library);
  return out;
}

std::vector<Availability> available_transports() { return {udp_availability(), tcp_availability(), verbs_availability(verbs_here())}; }

}  // namespace paramwire
