//! Lets the binaries find libtorch without `LD_LIBRARY_PATH`: an rpath to the folder torch-sys linked against.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}/../../nvidia/cu13/lib");
    }
}
