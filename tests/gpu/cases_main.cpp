// Runs every case on the device and writes what went in and what came out, for a reference in Python (test_torch_parity.py).
//
// usage: gpu_cases --out DIR
// writes DIR/manifest.json and DIR/*.npy (numpy.lib.format, version 1.0). status: 0; 1 with a text on stderr; 77 nothing to run on
//
// The manifest: {"device": text, "simulated": bool, "cases": [{"operation": text, "name": text, "numbers": {name: number},
// "buffers": {name: {"type": "bf16", "role": "input" or "output", "file": as it was before, "after": as it came out (outputs),
// "bits": bool, "absolute": number, "relative": number, "bounds": file or null}}}]}. bf16 lies in files of uint16.
#include "gpu/cases.hpp"
#include "gpu/json.hpp"

#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace paramwire::gpu {
namespace {

std::string_view npy_type(Type type) {
  constexpr std::string_view kTypes[] = {"|u1", "<u2", "<u4", "<u8", "<f4", "<f8", "<u2", "<f2"};
  return kTypes[static_cast<std::size_t>(type)];
}

std::string npy(Type type, const std::vector<std::uint64_t>& shape, std::span<const std::byte> bytes) {
  std::string header = cat("{'descr': '", npy_type(type), "', 'fortran_order': False, 'shape': (");
  for (const std::uint64_t size : shape) header += cat(size, ",");
  header += "), }";
  // Magic, version and length take 10 bytes; the whole header is a multiple of 64 and ends with a line feed.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string out("\x93NUMPY\x01\x00", 8);
  out += static_cast<char>(header.size() & 0xff);
  out += static_cast<char>(header.size() >> 8);
  out += header;
  return out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

class Writer {
 public:
  explicit Writer(std::string folder) : folder_(std::move(folder)) {}

  Status write(const Case& it, const Outcome& outcome) {
    std::string buffers;
    for (std::size_t i = 0; i < it.buffers.size(); ++i) {
      const CaseBuffer& buffer = it.buffers[i];
      if (buffer.role == Role::kScratch) continue;
      PARAMWIRE_TRY(before, file(buffer.name, buffer.type, buffer.shape, buffer.bytes));
      buffers += cat(buffers.empty() ? "" : ", ", json_string(buffer.name), ": {\"type\": ", json_string(type_name(buffer.type)), ", \"file\": ", before, ", \"role\": ");
      if (buffer.role == Role::kInput) {
        buffers += "\"input\"}";
        continue;
      }
      PARAMWIRE_TRY(after, file(cat(buffer.name, "_after"), buffer.type, buffer.shape, outcome[i]));
      std::string bounds = "null";
      if (!buffer.bounds.empty()) {
        PARAMWIRE_TRY(written, file(cat(buffer.name, "_bounds"), Type::kF64, buffer.shape, std::as_bytes(std::span(buffer.bounds))));
        bounds = written;
      }
      buffers += cat("\"output\", \"after\": ", after, ", \"bits\": ", buffer.bits, ", \"absolute\": ", json_number(buffer.absolute), ", \"relative\": ", json_number(buffer.relative),
                     ", \"bounds\": ", bounds, "}");
    }
    std::string numbers;
    for (const auto& [name, value] : it.numbers) numbers += cat(numbers.empty() ? "" : ", ", json_string(name), ": ", json_number(value));
    cases_ += cat(cases_.empty() ? "" : ",\n", "{\"operation\": ", json_string(it.operation), ", \"name\": ", json_string(it.name), ", \"numbers\": {", numbers, "}, \"buffers\": {", buffers,
                  "}}");
    ++count_;
    return {};
  }
  Status finish(const cuda::DeviceFacts& facts, bool simulated) const {
    const std::string text = cat("{\"device\": ", json_string(facts.name), ", \"simulated\": ", simulated, ", \"cases\": [\n", cases_, "\n]}\n");
    return put("manifest.json", text);
  }
  std::size_t count() const { return count_; }

 private:
  Status put(const std::string& name, std::string_view text) const {
    if (write_file(cat(folder_, "/", name), text)) return {};
    return Error(Code::kUnavailable, cat(folder_, "/", name, ": can't be written; is there room?"));
  }
  // returns: its name, quoted
  Result<std::string> file(const std::string& what, Type type, const std::vector<std::uint64_t>& shape, std::span<const std::byte> bytes) {
    const std::string name = cat(count_, "_", what, ".npy");
    PARAMWIRE_CHECK(put(name, npy(type, shape, bytes)));
    return json_string(name);
  }

  const std::string folder_;
  std::string cases_;
  std::size_t count_ = 0;
};

Status run(const World& world, const std::string& folder) {
  std::error_code made;
  std::filesystem::create_directories(folder, made);
  if (made) return Error(Code::kInvalid, cat(folder, ": ", made.message()));
  PARAMWIRE_TRY(bed, Bed::open(world));
  Writer writer(folder);
  for (const Case& it : all_cases(kSmallScale)) {
    PARAMWIRE_TRY(outcome, run_on_device(bed, it));
    PARAMWIRE_CHECK(writer.write(it, outcome));
  }
  PARAMWIRE_CHECK(writer.finish(bed.device->facts(), world.simulated));
  std::printf("%zu cases on %s\n", writer.count(), bed.device->facts().name.c_str());
  return {};
}

int fail(const Error& error) {
  std::fprintf(stderr, "gpu_cases: %s\n", error.to_string().c_str());
  return 1;
}

int run_main(const std::string& folder) {
  auto world = open_world();
  if (!world.ok()) {
    fail(world.error());
    return world.error().code() == Code::kUnavailable ? kSkipped : 1;
  }
  if (const Status done = run(**world, folder); !done.ok()) return fail(done.error());
  for (const std::string& finding : (*world)->findings()) return fail(Error(Code::kInternal, finding));
  return 0;
}

}  // namespace
}  // namespace paramwire::gpu

int main(int count, char** words) {
  if (count != 3 || std::string_view(words[1]) != "--out") {
    std::fprintf(stderr, "usage: gpu_cases --out DIR\n");
    return 1;
  }
  return paramwire::gpu::run_main(words[2]);
}
