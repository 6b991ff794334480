//! OCI image layers to overlaybd layers and back.
mod device;
mod ext2;
mod ext4;
mod programs;
#[cfg(test)]
mod proof {
    use crate::{device::*, ext2::*, ext4::*, programs::*};
    #[test]
    fn proof() {
        let size = 1 << 30;
        let mut d = Device::new(size, None, std::path::Path::new("/work/scratch/image")).unwrap();
        make_file_system(d.scratch(), size, "11111111-1111-4111-8111-111111111111", 5).unwrap();
        d.adopt().unwrap();
        let mut e = Ext2::open(d).unwrap();
        let ino = e.new_inode(2, 0o100644, false).unwrap();
        let mut i = Inode::new(FileType::Regular, 1);
        i.set_mode(0o100644);
        let (start, len) = e.free_run(0, 10).unwrap().unwrap();
        e.mark_blocks(start, len as u32, true);
        i.set_size(4096 * len);
        i.set_sectors(8 * len);
        i.set_inline_extents(&encode_inline(&[Extent { logical: 0, physical: start, count: len as u32, unwritten: false }]));
        e.write_inode(ino, &i).unwrap();
        e.set_attributes(ino, [(c"user.a", &b"x"[..]), (c"security.capability", &[7u8; 3000][..])].into_iter()).unwrap();
        let root = e.read_inode(2).unwrap();
        let x = walk(e.device(), 2, &root).unwrap();
        let b = read_block(e.device(), x[0].physical).unwrap();
        let mut v: Vec<(u32, u8, Vec<u8>)> = parse_block(&b).unwrap().iter().map(|e| (e.ino, e.code, e.name.to_vec())).collect();
        v.push((ino, 1, b"hello".to_vec()));
        let mut nb = build_single(2, 2, v.iter().map(|(a, b, c)| (*a, *b, &c[..])));
        e.write_dir_block(2, x[0].physical, &mut nb).unwrap();
        e.flush(7).unwrap();
        println!("{}", check_file_system(e.device().scratch()).unwrap());
        let v = Volume::open(e.device()).unwrap();
        println!("{:?}", v.attributes(ino, &v.inode(ino).unwrap()).unwrap().keys());
    }
}
