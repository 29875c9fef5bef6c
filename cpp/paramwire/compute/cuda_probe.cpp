#include "paramwire/compute/cuda_probe.hpp"

#include "paramwire/base/probe.hpp"
#include "paramwire/base/text.hpp"

namespace paramwire {

namespace {

constexpr const char* kNvidiaVendor = "0x10de";  // PCI vendor id: pci-ids.ucw.cz

}  // namespace

CudaFacts look_for_cuda(const std::string& root) {
  CudaFacts out;
  const std::string devices = root + "/sys/bus/pci/devices";
  for (const std::string& name : names_in(devices)) {
    if (first_line(cat(devices, '/', name, "/vendor")) == kNvidiaVendor) out.gpu = true;
  }
  for (const std::string& name : names_in(root + "/dev")) {
    if (name.starts_with("nvidia") || name == "dxg") out.nodes.push_back("/dev/" + name);
    if (name == "dxg") out.gpu = true;
  }
  out.kernel_module = first_line(root + "/proc/driver/nvidia/version");
  out.library_problem = library_problem("libcuda.so.1");
  out.distribution = distribution(root);
  return out;
}

Availability cuda_unavailable(const CudaFacts& facts, bool in_this_build, std::string_view problem) {
  Availability out{"cuda", false, {}};
  const auto say = [&out](std::string_view what) { out.reason += cat(out.reason.empty() ? "" : "; ", what); };
  if (!in_this_build) say("not in this build");
  if (!facts.gpu && facts.nodes.empty()) {
    say("no NVIDIA device on the PCI bus, no /dev/nvidia*");
    if (!facts.library_problem.empty()) out.reason += ", no library libcuda.so.1";
    out.next = "compute with backend \"cpu\": there is nothing to install here";
    return out;
  }
  if (facts.nodes.empty()) say("an NVIDIA device on the PCI bus, but no /dev/nvidia*");
  if (!facts.nodes.empty()) say(cat(facts.nodes.front(), " is there"));
  if (!facts.library_problem.empty()) say("no library libcuda.so.1");
  if (!problem.empty()) say(problem);
  if (facts.nodes.empty() && facts.kernel_module.empty()) {
    out.next = facts.distribution == "debian" ? "apt-get install nvidia-driver" : "install the NVIDIA driver";
  } else if (facts.nodes.empty() || !facts.library_problem.empty()) {
    out.next = "start the container with --gpus all (or install the user-space part of the driver)";
  } else {
    out.next = in_this_build ? "compute with backend \"cpu\"" : "build with -DPARAMWIRE_CUDA=ON, or compute with backend \"cpu\"";
  }
  return out;
}

}  // namespace paramwire
