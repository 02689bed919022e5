//! A real server of S3: `s3s-fs`, a program that the slow tests install.
