#include "paramwire/base/trace.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <new>
#include <pthread.h>
#include <string_view>
#include <sys/syscall.h>
#include <unistd.h>

namespace paramwire {

namespace {

constexpr std::size_t kEventsMax = std::size_t{1} << 27;

// Thread names are the embedding program's: anything may be in them.
std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", byte);
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::uint64_t next_serial() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

Result<std::shared_ptr<Trace>> Trace::create(std::size_t events_max) {
  if (events_max == 0 || events_max > kEventsMax) return Error(Code::kInvalid, cat("a trace of ", events_max, " events: 1 to ", kEventsMax, " are possible"));
  try {
    return std::shared_ptr<Trace>(new Trace(events_max));
  } catch (const std::bad_alloc&) {
    return Error(Code::kBackpressure, cat("no memory for a trace of ", events_max, " events of ", sizeof(Event), " bytes"));
  }
}

Trace::Trace(std::size_t events_max) : serial_(next_serial()), events_(events_max) {}

std::int32_t Trace::this_thread() noexcept {
  thread_local std::int32_t id = 0;
  thread_local std::uint64_t known = 0;  // the trace that has this thread's name
  if (id == 0) id = static_cast<std::int32_t>(::syscall(SYS_gettid));
  if (known == serial_) return id;
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  const std::lock_guard lock(mutex_);
  try {
    threads_.try_emplace(id, name.data());
    known = serial_;
  } catch (const std::bad_alloc&) {  // the number stands for the name
  }
  return id;
}

void Trace::add(const char* name, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t bytes) noexcept {
  const std::uint64_t at = next_.fetch_add(1, std::memory_order_relaxed);
  if (at >= events_.size()) return;
  Event& event = events_[static_cast<std::size_t>(at)];
  event.begin_ns = begin_ns;
  event.duration_ns = end_ns - begin_ns;
  event.bytes = bytes;
  event.thread = this_thread();
  event.name.store(name, std::memory_order_release);
}

std::uint64_t Trace::recorded() const noexcept { return std::min<std::uint64_t>(next_.load(std::memory_order_relaxed), events_.size()); }

std::uint64_t Trace::dropped() const noexcept {
  const std::uint64_t asked = next_.load(std::memory_order_relaxed);
  return asked > events_.size() ? asked - events_.size() : 0;
}

std::string Trace::json() const {
  const int pid = ::getpid();
  std::string out = cat("{\"displayTimeUnit\": \"ns\", \"otherData\": {\"dropped\": ", dropped(), "}, \"traceEvents\": [");
  const char* comma = "\n";
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [thread, name] : threads_) {
      out += cat(comma, "{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": ", pid, ", \"tid\": ", thread, ", \"args\": {\"name\": ", json_text(name), "}}");
      comma = ",\n";
    }
  }
  const std::uint64_t count = recorded();
  std::array<char, 256> line{};
  for (std::size_t i = 0; i < count; ++i) {
    const Event& event = events_[i];
    const char* name = event.name.load(std::memory_order_acquire);
    if (name == nullptr) continue;  // being written
    // ts and dur are microseconds, with a fraction.
    const int size = std::snprintf(line.data(), line.size(),
                                   "%s{\"name\": \"%s\", \"cat\": \"paramwire\", \"ph\": \"X\", \"ts\": %" PRId64 ".%03d, \"dur\": %" PRId64 ".%03d, \"pid\": %d, \"tid\": %d",
                                   comma, name, event.begin_ns / 1000, static_cast<int>(event.begin_ns % 1000), event.duration_ns / 1000,
                                   static_cast<int>(event.duration_ns % 1000), pid, event.thread);
    out.append(line.data(), static_cast<std::size_t>(std::clamp(size, 0, static_cast<int>(line.size()) - 1)));
    out += event.bytes != 0 ? cat(", \"args\": {\"bytes\": ", event.bytes, "}}") : std::string("}");
    comma = ",\n";
  }
  return out + "\n]}\n";
}

}  // namespace paramwire
