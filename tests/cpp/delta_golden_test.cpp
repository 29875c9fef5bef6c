// The library against tests/golden/delta.txt; tests/python/test_delta_golden.py holds an independent decoder against the same file.
#include "support/golden_text.hpp"

#include "paramwire/codec/delta.hpp"
#include "paramwire/codec/onebit.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

namespace paramwire {
namespace {

using namespace testing;

using Bytes = std::vector<std::byte>;
using Fields = std::map<std::string, std::string>;

// Lines of `kind`, each its key=value pairs.
std::vector<Fields> lines(const std::string& kind) {
  std::vector<Fields> out;
  std::ifstream in(std::string(PARAMWIRE_GOLDEN_DIR) + "/delta.txt");
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word != kind) continue;
    Fields fields;
    while (words >> word) fields[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    out.push_back(std::move(fields));
  }
  return out;
}

Version version_of(const std::string& text) {
  return {static_cast<std::uint32_t>(number(text.substr(0, text.find('.')))), number(text.substr(text.find('.') + 1))};
}

TEST(DeltaGolden, EveryDeltaIsWrittenAndReadAsItStands) {
  std::map<std::string, int> forms;
  for (Fields& line : lines("delta")) {
    const DType dtype = dtype_from_name(line["dtype"]).value();
    const Bytes base = unhex(line["base"]), result = unhex(line["result"]), golden = unhex(line["hex"]);
    const Version version = version_of(line["version"]);
    DeltaTuning tuning{std::nullopt, static_cast<unsigned>(number(line["classes"]))};
    for (const DeltaForm form : {DeltaForm::kFull, DeltaForm::kXor, DeltaForm::kSteps, DeltaForm::kSparse}) {
      if (line["only"] == delta_form_name(form)) tuning.only = form;
    }
    const auto delta = encode_delta(dtype, base, {version}, result, 1, tuning);
    ASSERT_TRUE(delta.ok()) << delta.error().message();
    EXPECT_TRUE(*delta == golden) << line["name"];
    const auto info = read_delta(golden);
    ASSERT_TRUE(info.ok()) << line["name"] << ": " << info.error().message();
    EXPECT_EQ(delta_form_name(info->form), line["form"]) << line["name"];
    EXPECT_EQ(info->base_version, version);
    Bytes out(base.size());
    const auto done = apply_delta(golden, dtype, base, version, out, 1);
    ASSERT_TRUE(done.ok()) << line["name"] << ": " << done.error().message();
    EXPECT_TRUE(out == result) << line["name"];
    ++forms[line["form"]];
  }
  EXPECT_EQ(forms.size(), 5U) << "same, full, xor, steps, sparse";
}

TEST(DeltaGolden, EveryOneBitDeltaIsWrittenAndReadAsItStands) {
  const auto all = lines("onebit");
  EXPECT_GE(all.size(), 4U);
  for (Fields line : all) {
    const DType dtype = dtype_from_name(line["dtype"]).value();
    const Bytes base = unhex(line["base"]), tuned = unhex(line["tuned"]), golden = unhex(line["hex"]);
    std::vector<std::uint64_t> dims;
    std::istringstream in(line["shape"]);
    for (std::string dim; std::getline(in, dim, ',');) dims.push_back(number(dim));
    const auto scale = line["scale"] == "row" ? OnebitScale::kRow : OnebitScale::kMatrix;
    const auto delta = encode_onebit(dtype, Shape::from(dims).value(), base, version_of(line["version"]), tuned, scale);
    ASSERT_TRUE(delta.ok()) << delta.error().message();
    EXPECT_TRUE(*delta == golden) << line["name"];
    Bytes out(base.size());
    const auto done = apply_onebit(golden, dtype, base, version_of(line["version"]), out, 1);
    ASSERT_TRUE(done.ok()) << line["name"] << ": " << done.error().message();
    EXPECT_TRUE(out == unhex(line["result"])) << line["name"];
  }
}

}  // namespace
}  // namespace paramwire
