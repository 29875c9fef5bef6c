#include "paramwire/compute/backend.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/cpu_backend.hpp"

namespace paramwire {

std::vector<BackendAvailability> available_backends() { return {cpu_backend_available()}; }

Result<std::unique_ptr<Backend>> open_backend(std::string_view spec, const BackendOptions& options) {
  if (spec == "cpu") return open_cpu_backend(options);
  return Error(Code::kInvalid, cat("backend '", spec, "' is unknown; expected cpu"));
}

}  // namespace paramwire
