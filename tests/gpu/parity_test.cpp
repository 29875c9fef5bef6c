// Every kernel on the device, against its body run on the host and against its CPU twin.
#include "gpu/cases.hpp"
#include "gpu/gpu_test.hpp"

#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>

namespace paramwire::gpu {
namespace {

class GpuParity : public GpuTest {
 protected:
  void check(const std::vector<Case>& cases) {
    const Bed on = bed();
    testing::LaneExecutor executor;
    for (const Case& it : cases) {
      SCOPED_TRACE(it.name);
      const auto device = run_on_device(on, it), host = run_on_host(executor, it);
      ASSERT_TRUE(device.ok()) << device.error().to_string();
      ASSERT_TRUE(host.ok()) << host.error().to_string();
      for (std::size_t i = 0; i < it.buffers.size(); ++i) {
        const CaseBuffer& buffer = it.buffers[i];
        if (buffer.role == Role::kScratch) continue;
        if (buffer.role == Role::kInput) {
          EXPECT_EQ((*device)[i], buffer.bytes) << buffer.name << " is read only";
          continue;
        }
        EXPECT_EQ(difference(buffer, (*device)[i], (*host)[i]), "") << "body on the host";
        if (!buffer.expected.empty()) {
          EXPECT_EQ(difference(buffer, (*device)[i], buffer.expected), "") << "CPU twin";
        }
      }
    }
  }
};

TEST_F(GpuParity, RowsAgreeWithTheirBodiesOnTheHost) { check(row_cases(scale())); }
TEST_F(GpuParity, ElementsAgreeWithTheirBodiesOnTheHost) { check(element_cases(scale())); }
TEST_F(GpuParity, AttentionAgreesWithItsBodiesOnTheHost) { check(attention_cases(scale())); }
TEST_F(GpuParity, ProductsAgreeWithTheirBodiesOnTheHostAndTheCpuBackendsLoop) { check(product_cases(scale())); }
TEST_F(GpuParity, ChecksumsHaveTheBitsOfTheCpu) { check(integrity_cases(scale())); }
TEST_F(GpuParity, DecodersHaveTheBitsOfTheCodecs) { check(decode_cases(scale())); }

// What compute-sanitizer runs, under which a launch takes some hundred times longer: every kernel, by its smallest case.
TEST_F(GpuParity, SanitizerRunsEachKernelByItsSmallestCase) {
  std::map<cuda::Kernel, Case> smallest;
  const auto size_of = [](const Case& it) {
    std::size_t out = 0;
    for (const CaseBuffer& buffer : it.buffers) out += buffer.bytes.size();
    return out;
  };
  for (const Case& it : all_cases(kSmallScale)) {
    // One element, or none, shows nothing.
    if (size_of(it) < 1000 && it.operation != "generation") continue;
    for (const cuda::Kernel kernel : kernels_of(it)) {
      const auto [known, first] = smallest.try_emplace(kernel, it);
      if (!first && size_of(it) < size_of(known->second)) known->second = it;
    }
  }
  std::vector<Case> cases;
  for (const auto& [kernel, it] : smallest) cases.push_back(it);
  EXPECT_EQ(cases.size(), cuda::kKernels);
  check(cases);
}

TEST(GpuCases, EveryKernelOfTheListHasOne) {
  std::set<cuda::Kernel> seen;
  std::set<std::string> names;
  for (const Case& it : all_cases(kSmallScale)) {
    for (const cuda::Kernel kernel : kernels_of(it)) seen.insert(kernel);
    EXPECT_TRUE(names.insert(it.name).second) << it.name << " twice";
  }
  for (std::size_t i = 0; i < cuda::kKernels; ++i) {
    EXPECT_EQ(seen.count(static_cast<cuda::Kernel>(i)), 1U) << "no case launches kernel " << cuda::kernel_name(static_cast<cuda::Kernel>(i));
  }
}

std::string compare(const CaseBuffer& buffer, const std::vector<float>& actual, const std::vector<float>& wanted) {
  return difference(buffer, std::as_bytes(std::span(actual)), std::as_bytes(std::span(wanted)));
}

// What makes the tests above able to fail.
TEST(GpuCases, ADifferenceIsWhatIsFurtherOffThanItMayBe) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  CaseBuffer buffer{.name = "out", .type = Type::kF32, .shape = {2}, .bytes = std::vector<std::byte>(8)};
  EXPECT_EQ(compare(buffer, {1, kNaN}, {1, kNaN}), "");
  EXPECT_EQ(compare(buffer, {0.0F, kInf}, {-0.0F, kInf}), "");
  for (const std::vector<float>& off : {std::vector<float>{1, 1.0000001F}, {1, kNaN}, {1, kInf}, {1, -1}}) EXPECT_NE(compare(buffer, off, {1, 1}), "");
  EXPECT_NE(compare(buffer, {1, 1}, {1, kNaN}), "");
  buffer.relative = 1e-6;
  EXPECT_EQ(compare(buffer, {1, 1.0000001F}, {1, 1}), "");
  EXPECT_NE(compare(buffer, {1, 1.00001F}, {1, 1}), "");
  EXPECT_NE(compare(buffer, {1, kInf}, {1, 3e38F}), "");
  buffer.bounds = {0.5, 0};
  EXPECT_EQ(compare(buffer, {1.25F, 1}, {1, 1}), "");
  EXPECT_NE(compare(buffer, {1, 1.0000001F}, {1, 1}), "");
  buffer.bits = true;
  EXPECT_NE(compare(buffer, {0.0F, 1}, {-0.0F, 1}), "");
}

TEST_F(GpuParity, AByteThatIsWrittenBesideABufferIsFound) {
  Case it = row_cases(scale())[0];
  ASSERT_EQ(it.operation, "embedding");
  it.buffers.back().bytes.resize(it.buffers.back().bytes.size() - 4);  // one element less than the kernel writes
  const auto refused = run_on_device(bed(), it);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("was written"), std::string::npos) << refused.error().to_string();
}

}  // namespace
}  // namespace paramwire::gpu
