// What a machine has for RDMA and CUDA, told from folders that look like machines.
#include "paramwire/base/probe.hpp"
#include "paramwire/compute/cuda_probe.hpp"
#include "paramwire/net/transports.hpp"
#include "paramwire/net/verbs_ports.hpp"
#include "support/table_verbs.hpp"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <string_view>

namespace paramwire {
namespace {

constexpr const char* kKernel = "6.1.0-9-amd64";

class ProbeTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "paramwire-probe-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void put(const std::string& path, std::string_view text) const {
    const std::filesystem::path whole = root_ + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  // A machine whose library opens, so that only the folders decide.
  Availability verbs() const {
    VerbsFacts facts = look_for_verbs(root_, kKernel);
    facts.library_problem.clear();
    facts.library_unfit.clear();
    return verbs_availability(facts);
  }
  Availability cuda(bool library) const {
    CudaFacts facts = look_for_cuda(root_);
    facts.library_problem = library ? "" : "libcuda.so.1: cannot open shared object file";
    return cuda_unavailable(facts, false);
  }

  std::string root_;
};

void expect_parts(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) EXPECT_NE(text.find(part), std::string::npos) << '"' << part << "\" is not in: " << text;
}
void expect_no_part(const std::string& text, std::string_view part) {
  EXPECT_EQ(text.find(part), std::string::npos) << '"' << part << "\" is in: " << text;
}

TEST_F(ProbeTest, KernelWithoutTheModuleNamesModulePackageAndCommandsWithTheRealInterface) {
  put("/etc/os-release", "NAME=\"Debian\"\nID=debian\n");
  put("/lib/modules/6.1.0-9-amd64/modules.dep", "kernel/drivers/net/veth.ko:\n");
  put("/sys/class/net/lo/operstate", "unknown\n");
  put("/sys/class/net/ens3/operstate", "down\n");
  put("/sys/class/net/ens5/operstate", "up\n");
  const Availability row = verbs();
  EXPECT_EQ(row.name, "verbs");
  EXPECT_FALSE(row.usable);
  expect_parts(row.reason, {"no RDMA device (/sys/class/infiniband)", "kernel 6.1.0-9-amd64 comes without module rdma_rxe"});
  expect_parts(row.next, {"apt-get install linux-image-amd64", "\nmodprobe rdma_rxe\n", "rdma link add rxe0 type rxe netdev ens5"});
  expect_no_part(row.reason, "libibverbs");
}

TEST_F(ProbeTest, EachDistributionHasItsPackage) {
  put("/lib/modules/6.1.0-9-amd64/modules.dep", "");
  put("/etc/os-release", "ID=ubuntu\n");
  expect_parts(verbs().next, {"linux-modules-extra-6.1.0-9-amd64"});
  put("/etc/os-release", "ID=\"rhel\"\n");
  expect_parts(verbs().next, {"dnf install kernel-modules-extra-6.1.0-9-amd64"});
  put("/etc/os-release", "ID=gentoo\n");
  expect_parts(verbs().next, {"CONFIG_RDMA_RXE"});
}

TEST_F(ProbeTest, ModuleOnDiskIsLoadedNext) {
  put("/lib/modules/6.1.0-9-amd64/modules.dep", "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/net/ipv4/udp_tunnel.ko\n");
  put("/sys/class/net/eth7/operstate", "unknown\n");
  const Availability row = verbs();
  expect_parts(row.reason, {"has not loaded module rdma_rxe"});
  EXPECT_EQ(row.next, "modprobe rdma_rxe\nrdma link add rxe0 type rxe netdev eth7");
}

TEST_F(ProbeTest, LoadedModuleNeedsALinkOnly) {
  put("/sys/module/rdma_rxe/refcnt", "0\n");
  put("/sys/class/net/eth0/operstate", "up\n");
  const Availability row = verbs();
  expect_no_part(row.reason, "rdma_rxe");
  EXPECT_EQ(row.next, "rdma link add rxe0 type rxe netdev eth0");
}

TEST_F(ProbeTest, BuiltInModuleCountsAsLoaded) {
  put("/lib/modules/6.1.0-9-amd64/modules.builtin", "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko\n");
  expect_no_part(verbs().next, "modprobe");
}

TEST_F(ProbeTest, KernelFromOutsideHasNoModuleFolder) { expect_parts(verbs().reason, {"kernel 6.1.0-9-amd64 has no files in /lib/modules"}); }

TEST_F(ProbeTest, MissingVerbsLibraryIsInstalledFirst) {
  put("/etc/os-release", "ID=debian\n");
  VerbsFacts facts = look_for_verbs(root_, kKernel);
  facts.library_problem = "libibverbs.so.1: cannot open shared object file";
  facts.library_unfit.clear();
  const Availability row = verbs_availability(facts);
  expect_parts(row.reason, {"libibverbs.so.1: cannot open shared object file; no RDMA device"});
  EXPECT_TRUE(row.next.starts_with("apt-get install libibverbs1 ibverbs-providers rdma-core\n")) << row.next;
}

// A machine with one RDMA device, "rx0", whose table `api` gives.
class VerbsProbeTest : public ProbeTest {
 protected:
  void SetUp() override {
    ProbeTest::SetUp();
    put("/etc/os-release", "ID=debian\n");
    put("/sys/class/infiniband/rx0/node_type", "1: CA\n");
    put("/sys/class/infiniband_verbs/abi_version", "6\n");
    for (const NetworkInterface& interface : network_interfaces()) {
      if (!interface.addresses.empty()) interface_ = interface;
    }
    if (interface_.addresses.empty()) GTEST_SKIP() << "no interface of this network namespace has an address";
    device_ = &api_.add("rx0");
    device_->gids = {table_gid(1, to_string(interface_.addresses.front()), IBV_GID_TYPE_ROCE_V2, interface_.index)};
  }
  VerbsFacts facts() {
    VerbsFacts out = look_for_verbs(root_, kKernel);
    out.library_problem.clear();
    out.library_unfit.clear();
    look_at_devices(out, api_);
    return out;
  }

  TableVerbs api_;
  TableDevice* device_ = nullptr;
  NetworkInterface interface_;
};

TEST_F(VerbsProbeTest, UsableDeviceIsTheOneThatWouldBeChosen) {
  const Availability row = verbs_availability(facts());
  EXPECT_TRUE(row.usable);
  EXPECT_EQ(row.reason, "rx0 port 1 GID 1 (RoCE v2, " + to_string(interface_.addresses.front()) + ", " + interface_.name + "), MTU 1024; software RDMA (rxe)");
  EXPECT_EQ(row.next, "");
  EXPECT_EQ(api_.registered_max, std::size_t{4} << 20);
  EXPECT_EQ(api_.open_count, 0);
}

TEST_F(VerbsProbeTest, LockedMemoryLimitIsNamedWithWhatRaisesIt) {
  device_->register_error = ENOMEM;
  const Availability row = verbs_availability(facts());
  EXPECT_FALSE(row.usable);
  expect_parts(row.reason, {"rx0, 4 MiB (4194304 bytes)", "errno 12", "the limit on locked memory is ", "--ulimit memlock=-1"});
  EXPECT_EQ(row.next, "ulimit -l unlimited");
}

TEST_F(VerbsProbeTest, TableWithoutAUsableRowIsShownWhole) {
  device_->state = IBV_PORT_DOWN;
  const Availability row = verbs_availability(facts());
  EXPECT_FALSE(row.usable);
  expect_parts(row.reason, {"no GID can be used; the table:\nrx0 port 1 GID 1 (RoCE v2, ", ": the port is DOWN"});
  EXPECT_EQ(row.next, "ip link set " + interface_.name + " up");
  device_->state = IBV_PORT_ACTIVE;
  device_->gids.front().ndev_ifindex = 0;
  const Availability elsewhere = verbs_availability(facts());
  expect_parts(elsewhere.reason, {"no interface of this network namespace has that address"});
  expect_parts(elsewhere.next, {"rdma link"});
  device_->open_error = ENOENT;
  const Availability closed = verbs_availability(facts());
  expect_parts(closed.reason, {"rx0: ibv_open_device: No such file or directory (errno 2)", "--device=/dev/infiniband"});
  EXPECT_EQ(closed.next, "");
}

TEST_F(VerbsProbeTest, DeviceThatTheLibraryDoesNotListNeedsItsProvider) {
  put("/sys/class/infiniband/mlx5_0/node_type", "1: CA\n");
  EXPECT_TRUE(verbs_availability(facts()).usable) << "the other one does";
  api_.devices.clear();
  Availability row = verbs_availability(facts());
  EXPECT_FALSE(row.usable);
  expect_parts(row.reason, {"libibverbs lists no mlx5_0, for want of its provider; libibverbs lists no rx0"});
  EXPECT_EQ(row.next, "apt-get install ibverbs-providers");
}

TEST_F(VerbsProbeTest, DeviceWithoutItsFileNeedsAnotherStartOfTheContainer) {
  put("/sys/class/infiniband_verbs/uverbs0/ibdev", "rx0\n");
  api_.devices.clear();
  Availability row = verbs_availability(facts());
  EXPECT_EQ(row.reason, "device rx0 has no file in /dev/infiniband");
  expect_parts(row.next, {"--device=/dev/infiniband"});
  put("/dev/infiniband/uverbs0", "");
  expect_parts(verbs_availability(facts()).reason, {"for want of its provider"});
}

TEST_F(VerbsProbeTest, KernelWithoutTheUserModuleIsToldToLoadIt) {
  std::filesystem::remove_all(root_ + "/sys/class/infiniband_verbs");
  api_.list_error = ENOSYS;
  const Availability row = verbs_availability(facts());
  expect_parts(row.reason, {"ibv_get_device_list: Function not implemented (errno 38); module ib_uverbs is not loaded"});
  EXPECT_EQ(row.next, "modprobe ib_uverbs");
}

TEST_F(VerbsProbeTest, LibraryThatDoesNotDoIsNamedBesideTheDevice) {
  VerbsFacts found = look_for_verbs(root_, kKernel);
  found.library_problem.clear();
  found.library_unfit = "libibverbs.so.1 has no function ibv_reg_mr: rdma-core 32 or newer is needed";
  const Availability row = verbs_availability(found);
  EXPECT_FALSE(row.usable);
  EXPECT_EQ(row.reason, "libibverbs.so.1 has no function ibv_reg_mr: rdma-core 32 or newer is needed; RDMA device rx0 is there");
}

TEST_F(ProbeTest, NoGpuIsNothingToInstall) {
  put("/sys/bus/pci/devices/0000:00:01.0/vendor", "0x1af4\n");
  put("/dev/null", "");
  const Availability row = cuda(false);
  EXPECT_EQ(row.name, "cuda");
  EXPECT_FALSE(row.usable);
  expect_parts(row.reason, {"not in this build", "no NVIDIA device on the PCI bus", "no /dev/nvidia*", "no library libcuda.so.1"});
  expect_parts(row.next, {"backend \"cpu\""});
}

TEST_F(ProbeTest, GpuWithoutDriverNeedsTheDriver) {
  put("/etc/os-release", "ID=debian\n");
  put("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  const Availability row = cuda(false);
  expect_parts(row.reason, {"an NVIDIA device on the PCI bus, but no /dev/nvidia*", "no library libcuda.so.1"});
  EXPECT_EQ(row.next, "apt-get install nvidia-driver");
}

TEST_F(ProbeTest, GpuThatAContainerHidesNeedsAnotherStart) {
  put("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580\n");
  expect_parts(cuda(false).next, {"--gpus all"});
}

TEST_F(ProbeTest, WorkingDriverLeavesOnlyTheBuild) {
  put("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  put("/dev/nvidia0", "");
  put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580\n");
  const Availability row = cuda(true);
  EXPECT_EQ(row.reason, "not in this build; /dev/nvidia0 is there");
  expect_parts(row.next, {"-DPARAMWIRE_CUDA=ON", "backend \"cpu\""});
}

TEST_F(ProbeTest, ABuildWithCudaDoesNotBlameItself) {
  put("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  put("/dev/nvidia0", "");
  put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535\n");
  const CudaFacts facts = [&] {
    CudaFacts looked = look_for_cuda(root_);
    looked.library_problem.clear();
    return looked;
  }();
  const Availability row = cuda_unavailable(facts, true, "this driver supports CUDA 12.2");
  EXPECT_FALSE(row.usable);
  EXPECT_EQ(row.reason, "/dev/nvidia0 is there; this driver supports CUDA 12.2");
  EXPECT_EQ(row.next, "compute with backend \"cpu\"");
}

TEST(Probe, LibrariesOpenOrSayWhyNot) {
  EXPECT_EQ(library_problem("libc.so.6"), "");
  expect_parts(library_problem("libpigeon.so.9"), {"libpigeon.so.9"});
  EXPECT_NE(kernel_release(), "unknown");
}

}  // namespace
}  // namespace paramwire
