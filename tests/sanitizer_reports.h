/* Included before every source of a watched core: names the file that reports of UndefinedBehaviorSanitizer go to.
 * GCC's run-time library of it does not read log_path beside AddressSanitizer's, and pytest keeps what a process that
 * ends has written to standard error. Clang has both in one library, which reads it. */
#include <dlfcn.h>
#include <stdlib.h>

__attribute__((constructor)) static void name_the_reports(void) {
    void *library = dlopen("libubsan.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void (*set_path)(const char *) = 0;
    if (library) *(void **)&set_path = dlsym(library, "__sanitizer_set_report_path");
    const char *path = getenv("CUTE_KERNELS_SANITIZER_REPORTS");
    if (set_path && path) set_path(path);
}
