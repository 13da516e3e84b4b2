// What every FFI handler shares: export, and errors that name what came.
#pragma once

#define INFER_EXPORT __attribute__((visibility("default")))

// Include after "xla/ffi/api/ffi.h" to define handlers.
#ifdef XLA_FFI_API_FFI_H_

#include <cstdio>
#include <string>

#define INFER_HANDLER(name, impl, binding)                            \
  extern "C" INFER_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*);    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, impl, binding)

namespace infer {

template <typename... Args>
xla::ffi::Error invalid(const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, format, args...);
  return xla::ffi::Error::InvalidArgument(text);
}

// "[3, 576]", for messages.
inline std::string shape_text(const xla::ffi::AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t d : buffer.dimensions()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(d);
  }
  return text + "]";
}

inline bool has_shape(const xla::ffi::AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return dims.size() == shape.size() && std::equal(dims.begin(), dims.end(), shape.begin());
}

}  // namespace infer

#endif
