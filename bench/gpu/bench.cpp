#include "bench.hpp"

namespace paramwire::gpu {

Result<double> Bench::device_seconds(const std::function<Status()>& enqueue) {
  const cuda::Driver& driver = bed.device->driver();
  const cuda::Current current(*bed.device);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_TRY(before, cuda::Event::create(bed.device, true));
  PARAMWIRE_TRY(after, cuda::Event::create(bed.device, true));
  const int warm_up = world.simulated ? 0 : 3;
  std::vector<double> seconds;
  for (int i = 0; i < warm_up + repetitions(); ++i) {
    PARAMWIRE_CHECK(bed.stream.record(before));
    PARAMWIRE_CHECK(enqueue());
    PARAMWIRE_CHECK(bed.stream.record(after));
    PARAMWIRE_CHECK(after.synchronize());
    float milliseconds = 0;
    PARAMWIRE_CHECK(bed.device->check(driver.cuEventElapsedTime(&milliseconds, before.handle(), after.handle()), "reading the time between events"));
    if (i >= warm_up) seconds.push_back(static_cast<double>(milliseconds) * 1e-3);
  }
  return median(std::move(seconds));
}

Result<double> Bench::copy_bandwidth() {
  if (copy_bandwidth_) return *copy_bandwidth_;
  const std::uint64_t bytes = size<std::uint64_t>(100'000, std::uint64_t{256} << 20, std::uint64_t{1} << 30);
  PARAMWIRE_TRY(source, bed.allocate(bytes));
  PARAMWIRE_TRY(target, bed.allocate(bytes));
  const cuda::Current current(*bed.device);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(bed.stream.fill(source.address(), std::byte{0x35}, bytes));
  PARAMWIRE_TRY(seconds, device_seconds([&] { return bed.stream.copy(target.address(), source.address(), bytes); }));
  PARAMWIRE_TRY(last, bed.download(target.address() + bytes - 1, 1));
  if (last[0] != std::byte{0x35}) return Error(Code::kInternal, "a copy on the device did not copy");
  copy_bandwidth_ = gigabytes(2 * static_cast<double>(bytes), seconds);
  return *copy_bandwidth_;
}

}  // namespace paramwire::gpu
