# JupyterLab on the notebooks in Linux, where Docker runs: on Macs, on Windows, on x86-64 and ARM.
#
#   docker build -t gpuaccel .
#   docker run --rm -it -p 127.0.0.1:8888:8888 gpuaccel
#
# It installs what Binder does. This image has a C++ compiler, which runs the kernels on the CPU.
FROM python:3.12
RUN useradd --create-home learner && install -d -o learner /home/learner/gpuaccel
USER learner
WORKDIR /home/learner/gpuaccel
ENV PATH=/home/learner/venv/bin:$PATH
RUN python -m venv /home/learner/venv
COPY --chown=learner . .
RUN rm -rf .venv && pip install --no-cache-dir -r binder/requirements.txt && binder/postBuild
EXPOSE 8888
# Docker publishes the port on the address that `docker run -p` names.
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", \
     "--LabApp.default_url=/lab/tree/notebooks/README.md"]
