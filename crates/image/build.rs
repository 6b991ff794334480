//! Links the shared library of ext2 file systems by the name of its file, so that no headers (`libext2fs-dev`) are needed.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-lib=dylib:+verbatim=libext2fs.so.2");
}
